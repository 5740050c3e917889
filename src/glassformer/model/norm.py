"""LayerNorm and RMSNorm over the last axis. Statistics of half-precision inputs are taken in float32."""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.shapes import Float


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
