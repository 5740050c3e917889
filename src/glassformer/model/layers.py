"""The layers around attention: norms, feed-forwards, token embedding, head.

Norms take the statistics of half-precision inputs in float32.
"""

from collections.abc import Callable
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.context import Tap
from glassformer.shapes import Float, Int


class _Norm(nn.Module):
    """What both norms share: the factor on the normalized vector."""

    width: tuple[int, ...]
    offset: float
    weight: nn.Parameter | None

    def factor(self) -> Float[Tensor, "*h W"]:
        """offset + weight; 1 without a weight."""
        return torch.ones(self.width) if self.weight is None else self.weight + self.offset


class LayerNorm(_Norm):
    """(x - mean) / sqrt(var + eps) * (offset + weight) + bias with the biased variance; torch's fused kernel."""

    def __init__(self, width: int, spec: c.LayerNorm, heads: int = 0):
        super().__init__()
        self.width, self.eps, self.offset = (width,), spec.eps, spec.offset
        self.weight = _weight(width, heads) if spec.weight else None
        self.bias = nn.Parameter(torch.empty(width)) if spec.bias else None

    def forward(self, x: Float[Tensor, "*n W"]) -> Float[Tensor, "*n W"]:
        if self.weight is not None and self.weight.dim() == 2:
            return F.layer_norm(x, self.width, None, None, self.eps) * self.factor()[:, None]
        weight = self.weight if self.weight is None or not self.offset else self.weight + self.offset
        return F.layer_norm(x, self.width, weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), eps inside the root."""

    bias = None

    def __init__(self, width: int, spec: c.RMSNorm, heads: int = 0):
        super().__init__()
        self.width, self.eps, self.offset = (width,), spec.eps, spec.offset
        self.weight = _weight(width, heads) if spec.weight else None

    def forward(self, x: Float[Tensor, "*n W"]) -> Float[Tensor, "*n W"]:
        if self.weight is not None and self.weight.dim() == 2:
            return F.rms_norm(x, self.width, None, self.eps) * self.factor()[:, None]
        if self.weight is None or not self.offset:
            return F.rms_norm(x, self.width, self.weight, self.eps)
        # in float32 up to the end: bfloat16 has too few bits for 1 + a small weight
        exact = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(exact), self.width, self.weight.to(exact) + self.offset, self.eps).to(x.dtype)


class Unchanged(nn.Identity):
    """x itself, in place of a norm that a layer does not have."""

    def factor(self) -> Float[Tensor, ""]:
        return torch.ones(())


def _weight(width: int, heads: int) -> nn.Parameter:
    """One weight for all vectors or, of the vectors (B,H,T,K) of heads, one for each head."""
    return nn.Parameter(torch.empty((heads, width) if heads else (width,)))


def build_norm(width: int, spec: c.Norm, heads: int = 0) -> LayerNorm | RMSNorm:
    """Build a norm over vectors of this width. With `heads`, each head has a weight of its own."""
    match spec:
        case c.LayerNorm():
            return LayerNorm(width, spec, heads)
        case c.RMSNorm():
            return RMSNorm(width, spec, heads)
        case _:
            assert_never(spec)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # exact: x * Phi(x)
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
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
    """down(activation(gate(x)) * (up(x) + offset)), with both factors limited if there is a limit."""

    def __init__(self, d_model: int, spec: c.Gated):
        super().__init__()
        self.activation, self.limit, self.up_offset = ACTIVATIONS[spec.activation], spec.limit, spec.up_offset
        self.gate = nn.Linear(d_model, spec.d_ff, bias=spec.bias)
        self.up = nn.Linear(d_model, spec.d_ff, bias=spec.bias)
        self.down = nn.Linear(spec.d_ff, d_model, bias=spec.has_down_bias)

    def forward(self, x: Float[Tensor, "*n D"], tap: Tap) -> Float[Tensor, "*n D"]:
        # one expression: a name for a factor would keep its input alive
        hidden = self.activation(self.limited_gate(tap("pre", self.gate(x)))) * self.factor(self.up(x))
        return self.down(tap("post", hidden))

    def limited_gate(self, gate: Float[Tensor, "*n F"]) -> Float[Tensor, "*n F"]:
        return gate if self.limit is None else gate.clamp(max=self.limit)

    def factor(self, up: Float[Tensor, "*n F"]) -> Float[Tensor, "*n F"]:
        up = up if self.limit is None else up.clamp(-self.limit, self.limit)
        return up + self.up_offset if self.up_offset else up


def build_dense(d_model: int, spec: c.Dense | c.Gated) -> Dense | Gated:
    match spec:
        case c.Dense():
            return Dense(d_model, spec)
        case c.Gated():
            return Gated(d_model, spec)
        case _:
            assert_never(spec)


class Embed(nn.Module):
    """scale * tokens[id] (+ segments[s])."""

    def __init__(self, cfg: c.ModelConfig):
        super().__init__()
        self.scale = cfg.embedding.scale
        width, n_segments = cfg.embedding_width, cfg.embedding.n_segments
        self.tokens = nn.Embedding(cfg.vocab_size, width)
        self.segments = nn.Embedding(n_segments, width) if n_segments else None

    def forward(
        self, tokens: Int[Tensor, "B T"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B T W"]:
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
        self.scale, self.softcap = spec.scale, spec.softcap
        width = cfg.head_width
        self.activation = ACTIVATIONS[spec.transform] if spec.transform else None
        self.transform = nn.Linear(cfg.d_model, width, bias=spec.transform_bias) if spec.has_transform else None
        self.norm = build_norm(width, cfg.norm) if spec.transform else None
        self.weight = None if spec.tied else nn.Parameter(torch.empty(cfg.vocab_size, width))
        self.bias = nn.Parameter(torch.empty(cfg.vocab_size)) if spec.bias else None

    def forward(self, x: Float[Tensor, "B T D"], table: Float[Tensor, "V W"]) -> Float[Tensor, "B T V"]:
        x = x if self.transform is None else self.transform(x)
        if self.activation is not None and self.norm is not None:
            x = self.norm(self.activation(x))
        if self.scale != 1:
            x = x * self.scale
        logits = F.linear(x, table if self.weight is None else self.weight, self.bias)
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap
