"""4-bit NormalFloat (NF4): weights in blocks of 64, each with the largest magnitude of its block and one of 16 levels.

A weight w of a block with largest magnitude a is stored as the level nearest to w / a, and read as level * a. The
levels are quantiles of the normal distribution. Dettmers et al. 2023 ("QLoRA"), section 3 and appendix E.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.shapes import Float, Shaped

BLOCK = 64
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class Quantized:
    """A matrix in NF4."""

    codes: Shaped[Tensor, "n"]
    """Two codes per byte, row by row; the first one in the upper 4 bits."""
    largest: Float[Tensor, "m"]
    """The largest magnitude of each block of 64 weights, float32."""
    shape: tuple[int, ...]
    levels: Float[Tensor, "16"]
    """LEVELS on the device of the codes: a CUDA graph cannot copy them there."""

    def dequantize(self) -> Float[Tensor, "..."]:
        """Return the matrix in float32."""
        n = int(torch.Size(self.shape).numel())
        pairs = torch.stack([self.codes >> 4, self.codes & 15], dim=1).flatten()[:n]
        levels = self.levels[pairs.int()]
        blocks = F.pad(levels, (0, -n % BLOCK)).view(-1, BLOCK) * self.largest[:, None]
        return blocks.flatten()[:n].view(self.shape)


def quantize(weight: Float[Tensor, "..."]) -> Quantized:
    """Return a matrix in NF4. A block of zeros stays a block of zeros."""
    flat = weight.detach().float().flatten()
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    scaled = blocks / torch.where(largest > 0, largest, 1.0)[:, None]
    levels = torch.tensor(LEVELS, device=flat.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(scaled.flatten()[: flat.numel()], middles).to(torch.uint8)
    codes = F.pad(codes, (0, codes.numel() % 2), value=LEVELS.index(0.0)).view(-1, 2)
    return Quantized(codes[:, 0] << 4 | codes[:, 1], largest, tuple(weight.shape), levels)


class _QuantizedMatmul(torch.autograd.Function):
    """x W^T with W in NF4. The backward pass dequantizes again, so that no copy of W is kept in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Quantized) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dequantize().to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.weight.dequantize().to(gradients[0].dtype), None


def quantized_linear(x: Float[Tensor, "*n I"], weight: Quantized) -> Float[Tensor, "*n O"]:
    """x W^T; W is frozen and gets no gradient. Under autocast the matmul is in its dtype."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    out: Tensor = _QuantizedMatmul.apply(x, weight)
    return out
