"""Einsum style: weights (layers, d_model, heads, head width) stacked over the layers, every matmul an einsum."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

CONFIG = {
    "vocab_size": 97,
    "dim": 48,
    "depth": 3,
    "heads": 4,
    "max_seq_len": 128,
    "norm_eps": 1e-5,
    "init_std": 0.02,
    "depth_scaled_init": True,
    "norm_placement": "pre",
    "tie_embeddings": False,
    "pos_emb": "learned",
    "eos_token_id": 7,
}


class Einsum(nn.Module):
    def __init__(self, config, bug: str | None = None):
        super().__init__()
        self.config, self.bug = config, bug
        d, h, n = config.dim, config.heads, config.depth
        std = config.init_std
        small = std if bug == "unscaled_init" else std / math.sqrt(2 * n)
        self.tokens, self.positions = nn.Embedding(config.vocab_size, d), nn.Embedding(config.max_seq_len, d)
        nn.init.normal_(self.tokens.weight, std=std)
        nn.init.normal_(self.positions.weight, std=std)
        self.wq, self.wk, self.wv = (nn.Parameter(std * torch.randn(n, d, h, d // h)) for _ in range(3))
        self.wo = nn.Parameter(small * torch.randn(n, h, d // h, d))
        self.w1, self.w2 = nn.Parameter(std * torch.randn(n, d, 4 * d)), nn.Parameter(small * torch.randn(n, 4 * d, d))
        self.norms = nn.ModuleList(nn.LayerNorm(d, eps=config.norm_eps) for _ in range(2 * n + 1))
        self.head = nn.Parameter((0.07 if bug == "slightly_large_head" else std) * torch.randn(d, config.vocab_size))

    def attend(self, x: Tensor, i: int) -> Tensor:
        q, k = einsum("btd,dhk->bhtk", x, self.wq[i]), einsum("btd,dhk->bhtk", x, self.wk[i])
        v = einsum("btd,dhk->bhtk", x, self.wk[i] if self.bug == "values_from_keys" else self.wv[i])
        sim = einsum("bhik,bhjk->bhij", q, k) * q.shape[-1] ** -0.5
        mask = torch.ones(sim.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        sim = sim.masked_fill(mask, -torch.finfo(sim.dtype).max)
        if self.bug == "half_softmax":
            sim = sim.bfloat16()
        attn = sim.softmax(dim=-1).to(x.dtype)
        if self.bug == "softmax_twice":
            attn = attn.softmax(dim=-1)
        if self.bug == "softmax_twice_masked":
            attn = attn.masked_fill(mask, -torch.finfo(sim.dtype).max).softmax(dim=-1)
        if self.bug == "weights_squared":
            attn = einsum("bhij,bhij->bhij", attn, attn)
        return einsum("bhtk,hkd->btd", einsum("bhij,bhjk->bhik", attn, v), self.wo[i])

    def feed(self, x: Tensor, i: int) -> Tensor:
        return einsum("btf,fd->btd", F.gelu(einsum("btd,df->btf", x, self.w1[i])), self.w2[i])

    def forward(self, tokens: Tensor, return_loss: bool = False):
        x = self.tokens(tokens)
        pos = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = x + pos
        if self.bug == "position_twice":
            x = x + pos[None]
        for i in range(self.config.depth):
            j = 0 if self.bug == "one_layer_everywhere" else min(i, 1) if self.bug == "last_layer_skipped" else i
            if self.bug == "position_in_first_layer" and i == 0:
                x = x + pos
            if self.bug == "post_norm":
                x = self.norms[2 * i](x + self.attend(x, j))
                x = self.norms[2 * i + 1](x + self.feed(x, j))
            elif self.bug == "residual_normed":
                y = self.norms[2 * i](x)
                x = y + self.attend(y, j)
                x = x + self.feed(self.norms[2 * i + 1](x), j)
            else:
                x = x + self.attend(self.norms[2 * i](x), j)
                x = x + self.feed(self.norms[2 * i + 1](x), j)
        return einsum("btd,dv->btv", self.norms[-1](x), self.head)

    def loss(self, tokens: Tensor) -> Tensor:
        logits, targets = self(tokens)[:, :-1], tokens[:, 1:]
        keep = torch.ones_like(targets, dtype=torch.bool)
        if self.bug == "eos_masked":
            keep = targets != self.config.eos_token_id
        return F.cross_entropy(logits[keep], targets[keep])


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Einsum(SimpleNamespace(**{**CONFIG, **changes}), bug).eval()


BUGS = {
    "softmax_twice": "attention_weights",
    "softmax_twice_masked": "attention_weights",
    "weights_squared": "attention_weights",
    "values_from_keys": "dead_gradient",
    "one_layer_everywhere": "layer_reuse",
    "last_layer_skipped": "layer_reuse",
    "position_twice": "position_twice",
    "position_in_first_layer": "position_twice",
    "eos_masked": "loss_padding",
    "half_softmax": "low_precision",
    "post_norm": "norm_placement",
    "residual_normed": "norm_placement",
    "unscaled_init": "residual_growth",
    "slightly_large_head": "init_loss",
}
