"""The layers around attention: norms, feed-forwards (dense, gated, mixture of experts), token embedding, head.

Norms take the statistics of half-precision inputs in float32.
"""

from collections.abc import Callable
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.context import NO_TAP, Tap
from glassformer.shapes import Float, Int


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias with the biased variance; torch's fused kernel."""

    def __init__(self, width: int, spec: c.LayerNorm):
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if spec.bias else None

    def forward(self, x: Float[Tensor, "*n W"]) -> Float[Tensor, "*n W"]:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, eps inside the root."""

    def __init__(self, width: int, spec: c.RMSNorm):
        super().__init__()
        self.eps = spec.eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Float[Tensor, "*n W"]) -> Float[Tensor, "*n W"]:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def build_norm(width: int, spec: c.Norm) -> LayerNorm | RMSNorm:
    match spec:
        case c.LayerNorm():
            return LayerNorm(width, spec)
        case c.RMSNorm():
            return RMSNorm(width, spec)
        case _:
            assert_never(spec)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # exact: x * Phi(x)
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
}


class Dense(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, d_model: int, spec: c.Dense):
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.up = nn.Linear(d_model, spec.d_ff, bias=spec.bias)
        self.down = nn.Linear(spec.d_ff, d_model, bias=spec.bias)

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        hidden = self.activation(tap("pre", self.up(x)))
        return self.down(tap("post", hidden))


class Gated(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, d_model: int, spec: c.Gated):
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = nn.Linear(d_model, spec.d_ff, bias=spec.bias)
        self.up = nn.Linear(d_model, spec.d_ff, bias=spec.bias)
        self.down = nn.Linear(spec.d_ff, d_model, bias=spec.bias)

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        hidden = self.activation(tap("pre", self.gate(x))) * self.up(x)
        return self.down(tap("post", hidden))


def build_dense(d_model: int, spec: c.Dense | c.Gated) -> Dense | Gated:
    match spec:
        case c.Dense():
            return Dense(d_model, spec)
        case c.Gated():
            return Gated(d_model, spec)
        case _:
            assert_never(spec)


class MoE(nn.Module):
    """sum over the A likeliest experts of p_e expert_e(x). No capacity: no token is dropped."""

    def __init__(self, d_model: int, spec: c.MoE):
        super().__init__()
        self.n_active, self.normalize = spec.n_active, spec.normalize
        self.router = nn.Linear(d_model, spec.n_experts, bias=False)
        self.experts = nn.ModuleList(build_dense(d_model, spec.expert) for _ in range(spec.n_experts))

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        logits = self.router(x)
        exact = torch.promote_types(logits.dtype, torch.float32)
        probabilities = tap("router", logits.softmax(-1, dtype=exact))
        gates, choice = top_experts(probabilities, self.n_active)
        choice = tap("choice", choice)
        if self.normalize:
            gates = gates / gates.sum(-1, keepdim=True)
        gates = gates.to(x.dtype)
        flat, out = x.flatten(0, -2), torch.zeros_like(x).flatten(0, -2)  # (n, D)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(choice.flatten(0, -2) == e)
            if len(token):
                value = expert(flat[token], NO_TAP) * gates.flatten(0, -2)[token, slot, None]
                out = out.index_add(0, token, value)
        return out.view_as(x)


def top_experts(
    probabilities: Float[Tensor, "*n E"], n_active: int
) -> tuple[Float[Tensor, "*n A"], Int[Tensor, "*n A"]]:
    """The A largest probabilities and their experts; ties go to the lowest index."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :n_active], order[..., :n_active]


def balance_loss(probabilities: Float[Tensor, "*n E"], choice: Int[Tensor, "*n A"]) -> Float[Tensor, ""]:
    """E * sum_e f_e P_e: 1 when experts are used evenly, E when one takes all. Fedus et al. 2021, eq. 4.

    f_e is the share of the n*A assignments that went to expert e (no gradient), P_e the mean probability of e.
    """
    n_experts = probabilities.shape[-1]
    counts = torch.bincount(choice.flatten(), minlength=n_experts).to(probabilities.dtype)
    share = counts / counts.sum()
    return n_experts * (share * probabilities.flatten(0, -2).mean(0)).sum()


class Embed(nn.Module):
    """scale * tokens[id] (+ segments[s])."""

    def __init__(self, cfg: c.ModelConfig):
        super().__init__()
        self.scale = cfg.embedding.scale
        self.tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.segments = nn.Embedding(cfg.embedding.n_segments, cfg.d_model) if cfg.embedding.n_segments else None

    def forward(
        self, tokens: Int[Tensor, "B T"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B T D"]:
        x = self.tokens(tokens)
        if self.scale != 1:
            x = x * self.scale
        if self.segments is not None:
            x = x + self.segments(torch.zeros_like(tokens) if segments is None else segments)
        return x


class Head(nn.Module):
    """From the residual stream to logits. A tied head has no matrix of its own: it uses the token embedding."""

    def __init__(self, cfg: c.ModelConfig, spec: c.Head):
        super().__init__()
        self.scale = spec.scale
        self.activation = ACTIVATIONS[spec.transform] if spec.transform else None
        self.transform = nn.Linear(cfg.d_model, cfg.d_model) if spec.transform else None
        self.norm = build_norm(cfg.d_model, cfg.norm) if spec.transform else None
        self.weight = None if spec.tied else nn.Parameter(torch.empty(cfg.vocab_size, cfg.d_model))
        self.bias = nn.Parameter(torch.empty(cfg.vocab_size)) if spec.bias else None

    def forward(self, x: Float[Tensor, "B T D"], table: Float[Tensor, "V D"]) -> Float[Tensor, "B T V"]:
        if self.transform is not None and self.activation is not None and self.norm is not None:
            x = self.norm(self.activation(self.transform(x)))
        if self.scale != 1:
            x = x * self.scale
        return F.linear(x, table if self.weight is None else self.weight, self.bias)
