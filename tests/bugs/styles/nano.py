"""nanoGPT's style: one matrix for q, k and v, a ModuleDict, `model(idx, targets) -> logits, loss`."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "block_size": 128,
    "vocab_size": 97,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 48,
    "dropout": 0.0,
    "bias": True,
    "init_std": 0.02,
    "scaled_init": True,
    "norm_placement": "pre",
    "tie_weights": False,
    "eos_token_id": 5,
}


class Attention(nn.Module):
    def __init__(self, config, bug):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.bug = config.n_head, bug
        mask = torch.tril(torch.ones(config.block_size, config.block_size, dtype=torch.bool))
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        if self.bug == "values_from_keys":
            v = k
        q, k, v = (part.view(B, T, self.n_head, -1).transpose(1, 2) for part in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        mask = self.mask[:T, :T]
        att = att.masked_fill(~mask, float("-inf"))
        return self.c_proj((self.weigh(att, mask) @ v).transpose(1, 2).contiguous().view(B, T, C))

    def weigh(self, att: Tensor, mask: Tensor) -> Tensor:
        if self.bug == "half_softmax":
            return F.softmax(att.half(), dim=-1).float()
        weights = F.softmax(att, dim=-1)
        if self.bug == "softmax_twice":
            weights = F.softmax(weights, dim=-1)
        if self.bug == "softmax_twice_masked":
            weights = F.softmax(weights.masked_fill(~mask, float("-inf")), dim=-1)
        if self.bug == "softmax_twice_additive":
            weights = F.softmax(weights + torch.zeros_like(weights).masked_fill(~mask, float("-inf")), dim=-1)
        if self.bug == "weights_squared":
            weights = weights * weights
        if self.bug == "weights_squared_normed":
            weights = weights.pow(2)
            weights = weights / weights.sum(-1, keepdim=True)
        return weights


class Block(nn.Module):
    def __init__(self, config, bug):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), Attention(config, bug)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(config.n_embd, 4 * config.n_embd),
                "act": nn.GELU(),
                "c_proj": nn.Linear(4 * config.n_embd, config.n_embd),
            }
        )
        self.bug = bug

    def feed(self, x: Tensor) -> Tensor:
        return self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "post_norm":
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.feed(x))
        x = x + self.attn(self.ln_1(x))
        return x + self.feed(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config, bug=None):
        super().__init__()
        self.config, self.bug = config, bug
        blocks = [Block(config, bug) for _ in range(config.n_layer)]
        if bug == "layers_multiplied":
            blocks = [Block(config, bug)] * config.n_layer
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        if bug == "mlp_shared":
            self.transformer["h"][2].mlp = self.transformer["h"][1].mlp
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            wanted = {"unscaled_init": "c_proj_weight", "unscaled_feed": "attn.c_proj.weight"}.get(bug, "c_proj.weight")
            if name.endswith(wanted):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
        if bug == "large_head":
            nn.init.normal_(self.lm_head.weight, std=0.1)
        if bug == "slightly_large_head":
            nn.init.normal_(self.lm_head.weight, std=0.06)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = self.transformer["wpe"](torch.arange(idx.shape[1], device=idx.device))
        x = self.transformer["wte"](idx) + pos
        if self.bug == "position_twice":
            x = x + pos
        if self.bug == "position_looked_up_twice":
            x = x + self.transformer["wpe"](torch.arange(idx.shape[1], device=idx.device))[None]
        for i, block in enumerate(self.transformer["h"]):
            if self.bug == "last_layer_skipped" and i == 2:
                block = self.transformer["h"][1]
            x = block(x)
        if self.bug == "layer_twice":
            x = self.transformer["h"][-1](x)
        if self.bug == "stack_twice":
            for block in self.transformer["h"]:
                x = block(x)
        x = self.transformer["ln_f"](x)
        if self.bug == "constant_logits":
            x = torch.zeros_like(x) + 0.5
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        if self.bug == "eos_masked":
            targets = targets.masked_fill(targets == self.config.eos_token_id, -1)
        if self.bug == "zero_masked":
            targets = targets.masked_fill(targets == 0, -1)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(SimpleNamespace(**{**CONFIG, **changes}), bug).eval()


BUGS = {
    "softmax_twice": "attention_weights",
    "softmax_twice_masked": "attention_weights",
    "softmax_twice_additive": "attention_weights",
    "weights_squared": "attention_weights",
    "weights_squared_normed": "attention_weights",
    "values_from_keys": "dead_gradient",
    "layers_multiplied": "layer_reuse",
    "mlp_shared": "layer_reuse",
    "layer_twice": "layer_reuse",
    "stack_twice": "layer_reuse",
    "last_layer_skipped": "layer_reuse",
    "position_twice": "position_twice",
    "position_looked_up_twice": "position_twice",
    "eos_masked": "loss_padding",
    "zero_masked": "loss_padding",
    "half_softmax": "low_precision",
    "constant_logits": "constant_logits",
    "post_norm": "norm_placement",
    "unscaled_init": "residual_growth",
    "unscaled_feed": "residual_growth",
    "large_head": "init_loss",
    "slightly_large_head": "init_loss",
}
"""bug -> the diagnosis that must be named first."""
