"""LayerNorm and RMSNorm over the last axis. Statistics of half-precision inputs are taken in float32."""

from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.shapes import Float


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
