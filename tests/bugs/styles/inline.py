"""Attention and feed-forward written out inside the block: RMS norms by hand, rotary, grouped heads, gated."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Settings:
    """The config is a class."""

    vocab_size = 97
    d_model = 48
    n_layers = 4
    n_heads = 4
    n_kv_heads = 2
    d_ff = 64
    context_length = 160
    rope_theta = 10000.0
    rms_eps = 1e-6
    tie_weights = False
    position = "rope"


class Norm(nn.Module):
    def __init__(self, width: int, eps: float, bug: str | None = None):
        super().__init__()
        self.g, self.eps, self.bug = nn.Parameter(torch.ones(width)), eps, bug

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "norm_over_time":
            return self.g * x * torch.rsqrt(x.square().mean((1, 2), keepdim=True) + self.eps)
        if self.bug == "eps_outside":
            return self.g * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)
        return self.g * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def rotated(x: Tensor, positions: Tensor, base: float, bug: str | None) -> Tensor:
    width = x.shape[-1]
    rates = base ** (-torch.arange(0, width, 2, device=x.device, dtype=torch.float32) / width)
    angles = positions[:, None, :, None].float() * rates
    a, b = x[..., ::2], x[..., 1::2]
    if bug == "pairs_mixed":
        cos, sin = angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)
        half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return (x * cos + half * sin).to(x.dtype)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c, bug: str | None):
        super().__init__()
        self.c, self.bug, self.width = c, bug, c.d_model // c.n_heads
        kv = c.n_kv_heads * self.width
        self.wq, self.wk = nn.Linear(c.d_model, c.d_model, bias=False), nn.Linear(c.d_model, kv, bias=False)
        self.wv, self.wo = nn.Linear(c.d_model, kv, bias=False), nn.Linear(c.d_model, c.d_model, bias=False)
        self.gate, self.up = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.n1, self.n2 = (Norm(c.d_model, c.rms_eps, bug if bug in NORMS else None) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        h, g = self.c.n_heads, self.c.n_kv_heads
        y = self.n1(x)
        q = self.wq(y).view(b, t, h, self.width).transpose(1, 2)
        k = self.wk(y).view(b, t, g, self.width).transpose(1, 2)
        v = (self.wk if self.bug == "values_from_keys" else self.wv)(y).view(b, t, g, self.width).transpose(1, 2)
        if self.bug != "not_rotated":
            q = rotated(q, positions, self.c.rope_theta, self.bug)
            if self.bug != "only_queries":
                k = rotated(k, positions, self.c.rope_theta, self.bug)
        if self.bug == "values_rotated":
            v = rotated(v, positions, self.c.rope_theta, self.bug)
        k, v = k.repeat_interleave(h // g, 1), v.repeat_interleave(h // g, 1)
        if self.bug == "softmax_twice":
            w = (q @ k.mT * self.width**-0.5).masked_fill(~mask, -torch.inf).softmax(-1)
            o = w.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        else:
            scale = {"no_scale": 1.0, "scaled_twice": 1 / self.width}.get(self.bug)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        o = o.reshape(b, t, d) if self.bug == "merged_untransposed" else o.transpose(1, 2).reshape(b, t, d)
        if self.bug == "residual_normed":
            x = y + self.wo(o)
        elif self.bug == "attention_not_added":
            x = self.wo(o)
        elif self.bug == "stream_twice":
            x = x + x + self.wo(o)
        else:
            x = x + self.wo(o)
        z = self.n2(x)
        gate = F.gelu(self.gate(z)) if self.bug == "gelu_gate" else F.silu(self.gate(z))
        f = self.down(gate * self.up(z))
        if self.bug == "feed_residual_normed":
            return z + f
        return x + f


NORMS = ("norm_over_time", "eps_outside")


class Model(nn.Module):
    def __init__(self, c, bug: str | None = None):
        super().__init__()
        self.cfg, self.bug = c, bug
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, bug) for _ in range(c.n_layers))
        self.out_norm, self.unembed = Norm(c.d_model, c.rms_eps), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.apply(self.start)
        if bug == "weights_assigned":
            self.blocks[2].wo.weight = self.blocks[1].wo.weight

    def start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        b, t = ids.shape
        i = torch.arange(t, device=ids.device)
        mask = (i[None] <= i[:, None])[None, None]
        if self.bug == "one_ahead":
            mask = (i[None] <= i[:, None] + 1)[None, None]
        if attention_mask is not None and self.bug != "padding_seen":
            mask = mask & (attention_mask.bool()[:, None, None] | torch.eye(t, dtype=torch.bool, device=ids.device))
        if positions is None:
            positions = i.expand(b, t) if attention_mask is None else (attention_mask.long().cumsum(1) - 1).clamp(0)
        x = self.emb(ids)
        for n, block in enumerate(self.blocks):
            if self.bug == "layer_skipped" and n == 2:
                block = self.blocks[1]
            x = block(x, positions, mask)
        x = x if self.bug == "no_final_norm" else self.out_norm(x)
        logits = self.unembed(x)
        return logits * 0 + self.unembed.weight.sum(1) if self.bug == "constant_logits" else logits

    def loss(self, ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        labels = ids if labels is None else labels
        if attention_mask is not None:
            labels = labels.masked_fill(~attention_mask.bool(), -100)
        logits = self(ids, attention_mask)
        if self.bug == "labels_aligned":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.bug == "mean_of_means":
            each = [F.cross_entropy(a[:-1], b[1:]) for a, b in zip(logits, labels, strict=True)]
            return torch.stack(each).mean()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(type("Settings", (Settings,), dict(changes)), bug).eval()


BUGS = {
    "norm_over_time": "norm_axis",
    "eps_outside": "norm_eps",
    "pairs_mixed": "rope_pairing",
    "not_rotated": "position_missing",
    "only_queries": "rope_relative",
    "values_rotated": "rope_values",
    "values_from_keys": "dead_gradient",
    "softmax_twice": "attention_weights",
    "no_scale": "attn_scale",
    "scaled_twice": "attn_scale",
    "merged_untransposed": "head_layout",
    "residual_normed": "norm_placement",
    "attention_not_added": "norm_placement",
    "stream_twice": "residual_growth",
    "feed_residual_normed": "norm_placement",
    "weights_assigned": "layer_reuse",
    "layer_skipped": "layer_reuse",
    "one_ahead": "causal_leak",
    "padding_seen": "pad_leak",
    "no_final_norm": "norm_placement",
    "constant_logits": "constant_logits",
    "labels_aligned": "label_shift",
    "mean_of_means": "loss_padding",
}
