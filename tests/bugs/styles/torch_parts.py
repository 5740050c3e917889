"""A decoder with `nn.MultiheadAttention`, time first (its default), learned positions, post-norm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 97,
    "d_model": 48,
    "nhead": 4,
    "num_layers": 3,
    "dim_feedforward": 80,
    "max_len": 160,
    "norm_first": False,
    "activation": "gelu",
    "dropout": 0.1,
    "layer_norm_eps": 1e-5,
}


class Layer(nn.Module):
    def __init__(self, c: dict, bug: str | None):
        super().__init__()
        d = c["d_model"]
        self.attn = nn.MultiheadAttention(d, c["nhead"], dropout=c["dropout"])
        self.lin1, self.lin2 = nn.Linear(d, c["dim_feedforward"]), nn.Linear(c["dim_feedforward"], d)
        eps = 1e-3 if bug == "other_eps" else c["layer_norm_eps"]
        self.ln1, self.ln2 = nn.LayerNorm(d, eps=eps), nn.LayerNorm(d, eps=eps)
        self.drop, self.bug = nn.Dropout(c["dropout"]), bug

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        read = self.ln1(x) if self.bug == "pre_norm" else x
        out, _ = self.attn(read, read, read, attn_mask=mask)
        if self.bug == "residual_detached":
            out = out.detach()
        if self.bug == "pre_norm":
            x = x + self.drop(out)
            return x + self.drop(self.lin2(F.gelu(self.lin1(self.ln2(x)))))
        if self.bug == "norm_before_sum":
            x = x + self.ln1(out)
        elif self.bug == "sum_forgotten":
            x = self.ln1(self.drop(out))
        else:
            x = self.ln1(x + self.drop(out))
        up = self.lin1(x)
        up = (
            F.gelu(up, approximate="tanh")
            if self.bug == "tanh_gelu"
            else F.relu(up)
            if self.bug == "relu"
            else F.gelu(up)
        )
        if self.bug == "dropout_always":
            up = F.dropout(up, 0.1)
        return self.ln2(x + self.drop(self.lin2(up)))


class Decoder(nn.Module):
    """`model(tokens, key_padding_mask)`: True = padding, as in torch."""

    def __init__(self, c: dict, bug: str | None):
        super().__init__()
        self.config, self.bug = c, bug
        self.tok, self.pos = nn.Embedding(c["vocab_size"], c["d_model"]), nn.Embedding(c["max_len"], c["d_model"])
        self.layers = nn.ModuleList(Layer(c, bug) for _ in range(c["num_layers"]))
        if bug == "layers_multiplied":
            self.layers = nn.ModuleList([self.layers[0] for _ in range(c["num_layers"])])
        self.out = nn.Linear(c["d_model"], c["vocab_size"])
        nn.init.normal_(self.tok.weight, std=0.02)
        nn.init.normal_(self.pos.weight, std=0.02)
        nn.init.normal_(self.out.weight, std=1.0 if bug == "large_head" else 0.02)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        t = tokens.shape[1]
        mask = torch.full((t, t), float("-inf"), device=tokens.device).triu(1)
        if self.bug == "mask_transposed":
            mask = mask.T
        if self.bug == "mask_boolean_inverted":
            mask = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
            mask.fill_diagonal_(False)
        if self.bug == "diagonal_hidden":
            mask = torch.full((t, t), float("-inf"), device=tokens.device).triu(0)
            mask[0, 0] = 0
        if self.bug == "far_keys_hidden":
            i = torch.arange(t)
            mask = mask.masked_fill(i[:, None] - i >= 16, float("-inf"))
        if key_padding_mask is not None and self.bug != "padding_seen":
            others = ~torch.eye(t, dtype=torch.bool, device=tokens.device)  # a query with no key would be NaN
            hidden = (key_padding_mask[:, None] & others).repeat_interleave(self.config["nhead"], 0)
            mask = mask.expand_as(hidden).masked_fill(hidden, True if mask.dtype is torch.bool else float("-inf"))
        where = torch.arange(tokens.shape[0] if self.bug == "positions_by_row" else t, device=tokens.device)
        x = self.tok(tokens)
        if self.bug == "positions_by_row":
            x = x + self.pos(where)[:, None]
        elif self.bug == "positions_clamped":
            x = x + self.pos(where.clamp(max=31))
        else:
            x = x + self.pos(where)
        if self.bug == "position_twice":
            x = x + self.pos.weight[:t]
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x.transpose(0, 1))


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder({**CONFIG, **changes}, bug).eval()


BUGS = {
    "other_eps": "norm_eps",
    "pre_norm": "norm_placement",
    "padding_seen": "pad_leak",
    "residual_detached": "dead_gradient",
    "norm_before_sum": "norm_placement",
    "sum_forgotten": "norm_placement",
    "tanh_gelu": "activation",
    "relu": "activation",
    "dropout_always": "eval_stochastic",
    "layers_multiplied": "layer_reuse",
    "large_head": "init_loss",
    "mask_transposed": "causal_leak",
    "mask_boolean_inverted": "causal_leak",
    "diagonal_hidden": "over_mask",
    "far_keys_hidden": "over_mask",
    "positions_by_row": "position_missing",
    "positions_clamped": "position_missing",
    "position_twice": "position_twice",
}
