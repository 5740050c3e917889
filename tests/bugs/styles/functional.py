"""Functional style: all weights in one ParameterDict, the forward pass in plain functions, no modules inside."""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONFIG = {
    "vocab_size": 97,
    "d_model": 48,
    "n_layers": 3,
    "n_heads": 4,
    "max_len": 128,
    "eps": 1e-5,
    "init_std": 0.02,
    "residual_init": "1/sqrt(2L)",
    "pre_norm": True,
    "tied": False,
    "eos_id": 3,
    "pad_id": None,
    "activation": "gelu",
    "position": "sinusoidal",
}


def sinusoids(length: int, width: int) -> Tensor:
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return 0.02 * torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def attention(p: nn.ParameterDict, layer: int, x: Tensor, mask: Tensor, heads: int, bug: str | None) -> Tensor:
    def split(name: str) -> Tensor:
        return F.linear(x, p[f"{name}{layer}"]).unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = split("wq"), split("wk"), split("wk" if bug == "values_from_keys" else "wv")
    scores = torch.where(mask, q @ k.mT / math.sqrt(q.shape[-1]), -torch.inf)
    weights = scores.to(torch.float16).softmax(-1).to(x.dtype) if bug == "half_softmax" else scores.softmax(-1)
    if bug == "softmax_twice_masked":
        weights = torch.where(mask, weights, -torch.inf).softmax(-1)
    if bug == "softmax_by_hand_twice":
        top = weights.exp() * mask
        weights = top / top.sum(-1, keepdim=True)
    if bug == "weights_squared":
        weights = torch.square(weights)
    return F.linear((weights @ v).transpose(1, 2).flatten(2), p[f"wo{layer}"])


def feed(p: nn.ParameterDict, layer: int, x: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, p[f"up{layer}"])), p[f"down{layer}"])


class Functional(nn.Module):
    def __init__(self, config, bug: str | None = None):
        super().__init__()
        self.config, self.bug = config, bug
        d, std = config.d_model, config.init_std
        small = std / math.sqrt(2 * config.n_layers)
        p = nn.ParameterDict()
        p["embed"] = nn.Parameter(std * torch.randn(config.vocab_size, d))
        for i in range(config.n_layers):
            for name in ("wq", "wk", "wv"):
                p[f"{name}{i}"] = nn.Parameter(std * torch.randn(d, d))
            p[f"wo{i}"] = nn.Parameter((std if bug == "unscaled_init" else small) * torch.randn(d, d))
            p[f"up{i}"] = nn.Parameter(std * torch.randn(4 * d, d))
            p[f"down{i}"] = nn.Parameter(
                (std if bug in ("unscaled_init", "unscaled_feed") else small) * torch.randn(d, 4 * d)
            )
            p[f"gain_a{i}"], p[f"gain_f{i}"] = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        p["gain"] = nn.Parameter(torch.ones(d))
        p["head"] = nn.Parameter((0.07 if bug == "slightly_large_head" else std) * torch.randn(config.vocab_size, d))
        self.p = p
        self.register_buffer("waves", sinusoids(config.max_len, d))

    def layer_of(self, i: int) -> int:
        if self.bug == "one_layer_everywhere":
            return 0
        if self.bug == "last_layer_skipped":
            return min(i, 1)
        return i

    def forward(self, idx: Tensor) -> Tensor:
        p, cfg, T = self.p, self.config, idx.shape[1]
        x = F.embedding(idx, p["embed"]) + self.waves[:T]
        if self.bug == "position_twice":
            x = self.waves[None, :T] + x
        if self.bug == "position_added_in_place":
            x += self.waves[:T]
        mask = torch.ones(T, T, dtype=torch.bool, device=idx.device).tril()

        def norm(x: Tensor, gain: Tensor) -> Tensor:
            return F.layer_norm(x, gain.shape, gain, None, cfg.eps)

        depths = [0, 1, 1, 2] if self.bug == "layer_twice" else range(cfg.n_layers)
        for depth in depths:
            i = self.layer_of(depth)
            if self.bug == "post_norm":
                x = norm(x + attention(p, i, x, mask, cfg.n_heads, self.bug), p[f"gain_a{i}"])
                x = norm(x + feed(p, i, x), p[f"gain_f{i}"])
            else:
                x = x + attention(p, i, norm(x, p[f"gain_a{i}"]), mask, cfg.n_heads, self.bug)
                fed = feed(p, i, norm(x, p[f"gain_f{i}"]))
                x = x + x + fed if self.bug == "stream_twice" else x + fed
        return F.linear(norm(x, p["gain"]), p["head"])

    def loss(self, idx: Tensor) -> Tensor:
        logits, targets = self(idx)[:, :-1], idx[:, 1:]
        if self.bug == "eos_masked":
            targets = targets.masked_fill(targets == self.config.eos_id, -100)
        if self.bug == "several_masked":
            targets = targets.masked_fill(targets < 4, -100)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(bug: str | None = None, **changes: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Functional(SimpleNamespace(**{**CONFIG, **changes}), bug).eval()


def constant(idx: Tensor) -> Tensor:
    """A callable whose logits ignore the tokens."""
    return torch.linspace(-1, 1, 97).expand(*idx.shape, 97).clone()


def positional(idx: Tensor) -> Tensor:
    """A callable whose logits know positions only."""
    return torch.sin(torch.arange(idx.shape[1])[:, None] * torch.arange(97)).expand(idx.shape[0], -1, -1).clone()


BUGS = {
    "softmax_twice_masked": "attention_weights",
    "softmax_by_hand_twice": "attention_weights",
    "weights_squared": "attention_weights",
    "values_from_keys": "dead_gradient",
    "one_layer_everywhere": "layer_reuse",
    "last_layer_skipped": "layer_reuse",
    "layer_twice": "layer_reuse",
    "position_twice": "position_twice",
    "position_added_in_place": "position_twice",
    "eos_masked": "loss_padding",
    "several_masked": "loss_padding",
    "half_softmax": "low_precision",
    "post_norm": "norm_placement",
    "unscaled_init": "residual_growth",
    "unscaled_feed": "residual_growth",
    "stream_twice": "residual_growth",
    "slightly_large_head": "init_loss",
}
