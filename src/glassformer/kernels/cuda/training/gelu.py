"""Products of a feed-forward's training step with its GELU, on Hopper GPUs (gelu.cu).

With x = h W^T + b, y = gelu(x), and dy given through the product that follows, the gradient of x is dy gelu'(x). The
product that makes x gives y and the slope gelu'(x), so nobody takes an exponential on the way back:

    s = sigmoid(2 u),    u = sqrt(2 / pi) (x + 0.044715 x^3),    y = x s
    gelu'(x) = s + x s (1 - s) 2 u',    2 u' = 2 sqrt(2 / pi) (1 + 3 0.044715 x^2)

This is GELU in its form with tanh, as 1 + tanh u = 2 s. The slope is rounded to bfloat16, like all that is kept.
"""

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels.cuda.training import hopper, tiles
from glassformer.kernels.toolchain import nvrtc

LEAST_TILES = 4
"""For each block; with fewer, some wait for others at the end."""
MOST_DEPTH = 768
"""Of the products. Deeper ones are faster in the larger tiles of cuBLASLt: GELU is less of their time."""


class Given(ctypes.Structure):
    """The kernels' argument."""

    _fields_ = [
        *((name, nvrtc.Map) for name in ("left", "right", "out", "slope")),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "columns")),
        ("unused", ctypes.c_uint64 * 6),  # to a multiple of 64 bytes
    ]


def source(depth: int, biased: bool = False) -> str:
    return tiles.source("gelu.cu", depth, BIASED=int(biased))


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether x weight^T and the gradient of its GELU are made here."""
    narrow = x.dtype is weight.dtype is torch.bfloat16 and x.is_cuda
    fits = x.shape[1] % 8 == 0 and x.shape[1] <= MOST_DEPTH and len(weight) % 8 == 0
    if not (narrow and fits and hopper.available()):
        return False
    return -(-len(x) // tiles.TILE) * -(-len(weight) // tiles.TILE) >= LEAST_TILES * hopper.blocks()


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


@torch.library.custom_op("glassformer::gelu_and_slope", mutates_args=())
def gelu_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gelu(z), gelu'(z)), z = x weight^T + bias."""
    z = _wide(x) @ _wide(weight).T
    z = z if bias is None else z + _wide(bias)
    slope = torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate="tanh")
    return F.gelu(z, approximate="tanh").to(x.dtype), slope.to(x.dtype)


@gelu_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight))


@gelu_product.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    post, slope = (torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device) for _ in range(2))
    _launch("gelu_product", x.contiguous(), weight.contiguous(), post, slope, bias)
    return post, slope


@torch.library.custom_op("glassformer::slope_product", mutates_args=())
def slope_product(dy: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    """(dy weight^T) slope, number by number."""
    return (_wide(dy) @ _wide(weight).T * _wide(slope)).to(dy.dtype)


@slope_product.register_fake
def _(dy: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    return torch.empty_like(slope)


@slope_product.register_kernel("cuda")
def _(dy: Tensor, weight: Tensor, slope: Tensor) -> Tensor:
    out = torch.empty_like(slope)
    _launch("slope_product", dy.contiguous(), weight.contiguous(), out, slope.contiguous(), None)
    return out


def matrices(left: Tensor, right: Tensor, out: Tensor, slope: Tensor) -> dict[str, tuple[Tensor, int]]:
    """What the copy engine copies, and the rows it takes at a time."""
    return tiles.factors(left, right) | {"out": (out, 64), "slope": (slope, 64)}


def _launch(name: str, left: Tensor, right: Tensor, out: Tensor, slope: Tensor, bias: Tensor | None) -> None:
    given = Given(
        **{name: nvrtc.tensor_map(*of) for name, of in matrices(left, right, out, slope).items()},
        bias=None if bias is None else bias.data_ptr(),
        rows=len(out),
        columns=out.shape[1],
    )
    text = source(left.shape[1], bias is not None)
    tiles.launch(text, name, given, left.device.index or 0, boards=2)
