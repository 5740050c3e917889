"""Products in 8 bits: formats, units, and the operators that fp8_layers.py and the loss are made of.

`machine.products = "float8"` asks for them. Tensors are rounded to 8 bits just before a product and nowhere else:
weights, their gradients, optimiser, norms, attention and the residual stream stay what they are.

    e4m3   weights and activations   1 + 4 + 3 bits, to 448     relative rounding error up to 2^-4
    e5m2   gradients                 1 + 5 + 2 bits, to 57344   relative rounding error up to 2^-3

A tensor x is stored as x8 = round(x / unit), and a product of two is multiplied by both units again. A unit is a power
of two, so dividing by it is exact, and it is the root mean square of x, rounded down: a typical value lies at 1, which
leaves a factor of 448 (57344) above it before values saturate and 2^-9 (2^-16) below it before they vanish. Units are
not carried from step to step (resuming stays exact) and no pass looks for a maximum. With ms the mean square: weights
are measured; large activations and gradients are too, an eighth of them (`sample`); what a norm made has ms(gain) +
ms(bias), as its rows have mean square 1 before these; and what is as wide as the feed-forward gets what is expected of
a product of independent factors, ms(x W^T + b) = D ms(x) ms(W) + ms(b). What is not finite becomes NaN and stays
visible.

A GPU's tensor cores read both factors along the summed dimension. Weight gradients sum over rows, so what enters them
is needed transposed, and casts write both layouts. The functions here define what fp8_cuda.py does in one pass on a
GPU (tests/kernels/cuda/training/test_fp8_cuda.py compares them), and are what runs on a CPU, in tests only. Each is an operator of
its own (`torch.library.custom_op`), which a compiler leaves alone and a CUDA graph can capture: nothing here waits for
the device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.config import ConfigError
from glassformer.kernels.cuda.training import fp8_cuda
from glassformer.kernels.toolchain import cublas

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MULTIPLE = 16
"""What the products of a GPU want every dimension to be a multiple of."""
FAST = {"forward": True, "inputs": True, "weights": True}
"""Whether sums stay in the tensor core's short accumulator: of forward products, of gradients of inputs, of weights."""
SMALLEST_UNIT, LARGEST_UNIT = 2.0**-60, 2.0**60
GRADIENT_UNIT = 2.0**-14
"""Of the loss's gradient with respect to the logits, which lies within [-1, 1] but for a z-loss."""
GELU_SLOPE, GELU_CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def mean_square(x: Tensor) -> Tensor:
    """In float32, by rows first."""
    return x.float().square().mean(-1).mean()


def sample(x: Tensor) -> Tensor:
    """One line of 128 bytes of every eight, a different one each time: no period of the data can hide from it."""
    size = 128 // x.element_size()
    lines = x.reshape(-1)[: x.numel() // (8 * size) * 8 * size].view(-1, 8, size)
    group = torch.arange(len(lines), device=x.device)
    return lines[group, (group * 2654435761 % 2**32) >> 29]


def unit_of(ms: Tensor) -> Tensor:
    """The largest power of two within the root of a mean square; 1 of zero, and NaN of what is not finite."""
    rms = ms.sqrt()
    power = (rms.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(SMALLEST_UNIT, LARGEST_UNIT)
    return torch.where(rms.isfinite(), torch.where(rms == 0, 1.0, power), torch.nan)


def quantise(x: Tensor, unit: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x / unit in 8 bits: to the nearest (ties to even), saturating; NaN where it is not finite."""
    y = x.float() * (1 / unit)  # of a power of two: exact, and a norm's kernel that divided took a fifth longer
    limit = LARGEST[dtype]
    return (y.clamp(-limit, limit) + 0 * y).to(dtype)  # infinity times zero is NaN


def activation(y: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(value, derivative) in float32."""
    match kind:
        case "relu":
            return y.relu(), (y > 0).float()
        case "relu2":
            return y.relu().square(), 2 * y.relu()
        case "silu":
            s = y.sigmoid()
            return y * s, s * (1 + y * (1 - s))
        case "gelu_tanh":  # y (1 + tanh(u)) / 2 = y sigmoid(2 u)
            s = (GELU_SLOPE * (y + GELU_CUBIC * y * y * y)).sigmoid()
            return y * s, s + y * s * (1 - s) * GELU_SLOPE * (1 + 3 * GELU_CUBIC * y * y)
        case "gelu":
            cdf = 0.5 * (1 + torch.erf(y * math.sqrt(0.5)))
            return y * cdf, cdf + y * torch.exp(-0.5 * y * y) * (1 / math.sqrt(2 * math.pi))
        case "tanh":
            t = y.tanh()
            return t, 1 - t * t
        case _:
            raise AssertionError(kind)


def _turned(x: Tensor) -> Tensor:
    """The transpose in memory of its own, also that of a single row."""
    return x.T.clone(memory_format=torch.contiguous_format)


# The operators: each with what it computes, and the shapes a compiler may count on.


@torch.library.custom_op("glassformer::fp8_square_parts", mutates_args=())
def square_parts(tensors: list[Tensor], sampled: bool) -> Tensor:
    """Parts whose sum is the mean square of a tensor, a row for each: a GPU has many, which a compiler adds up where it
    needs the sum."""
    large = [sampled and t.numel() >= fp8_cuda.SAMPLED_FROM for t in tensors]
    squares = [mean_square(sample(t) if some else t) for t, some in zip(tensors, large, strict=True)]
    return torch.stack(squares)[:, None]


@square_parts.register_fake
def _(tensors: list[Tensor], sampled: bool) -> Tensor:
    parts = fp8_cuda.PARTS if tensors[0].is_cuda else 1
    return tensors[0].new_empty(len(tensors), parts, dtype=torch.float32)


def mean_squares(tensors: list[Tensor], sampled: bool) -> Tensor:
    """Of up to four tensors in one go; bfloat16 or float32. `sampled`: of an eighth of those that are large."""
    return square_parts(tensors, sampled).sum(1)


@torch.library.custom_op("glassformer::fp8_cast_all", mutates_args=())
def cast_all(
    parts: list[Tensor], unit: Tensor, dtype: torch.dtype, beside: bool, rows: int | None
) -> tuple[Tensor, Tensor]:
    """Matrices one below the other (or one beside the other) in 8 bits, as they stand and transposed; with rows of
    zeros at the end where `rows` are more than they have."""
    x8 = quantise(torch.cat(parts, int(beside)), unit, dtype)
    if rows is not None:
        x8 = torch.cat([x8, x8.new_zeros(rows - len(x8), x8.shape[1])])
    return x8, _turned(x8)


@cast_all.register_fake
def _(parts: list[Tensor], unit: Tensor, dtype: torch.dtype, beside: bool, rows: int | None) -> tuple[Tensor, Tensor]:
    total, (down, across) = sum(x.shape[int(beside)] for x in parts), parts[0].shape
    down, across = (down, total) if beside else (total if rows is None else rows, across)
    return unit.new_empty(down, across, dtype=dtype), unit.new_empty(across, down, dtype=dtype)


def cast(x: Tensor, unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, as it stands and transposed."""
    return cast_all([x], unit, dtype, False, None)


@torch.library.custom_op("glassformer::fp8_turn", mutates_args=())
def turn(x: Tensor) -> Tensor:
    """The transpose of a matrix of 8 bits in memory of its own."""
    return _turned(x)


@turn.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0])


@torch.library.custom_op("glassformer::fp8_activate", mutates_args=())
def activate(pre: Tensor, unit: Tensor, kind: str) -> Tensor:
    """activation(pre) in e4m3."""
    return quantise(activation(pre.float(), kind)[0], unit, E4M3)


@activate.register_fake
def _(pre: Tensor, unit: Tensor, kind: str) -> Tensor:
    return pre.new_empty(pre.shape, dtype=E4M3)


@torch.library.custom_op("glassformer::fp8_activate_backward", mutates_args=())
def activate_backward(
    d_post: Tensor, pre: Tensor, unit: Tensor, post_unit: Tensor, kind: str, summed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gradient of pre in e5m2, the same transposed, activation(pre) in e4m3 transposed, the gradient's float32 sum
    over rows, empty unless `summed`)."""
    post, slope = activation(pre.float(), kind)
    d_pre = d_post.float() * slope
    d_pre8 = quantise(d_pre, unit, E5M2)
    sums = d_pre.sum(0) if summed else d_pre.new_empty(0)
    return d_pre8, _turned(d_pre8), _turned(quantise(post, post_unit, E4M3)), sums


@activate_backward.register_fake
def _(
    d_post: Tensor, pre: Tensor, unit: Tensor, post_unit: Tensor, kind: str, summed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = pre.shape
    turned = pre.new_empty(columns, rows, dtype=E4M3)
    sums = pre.new_empty(columns if summed else 0, dtype=torch.float32)
    return pre.new_empty(rows, columns, dtype=E5M2), pre.new_empty(columns, rows, dtype=E5M2), turned, sums


@torch.library.custom_op("glassformer::fp8_product", mutates_args=())
def product(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    """a (M,K) times b (N,K) transposed, both in 8 bits, in bfloat16: a b^T a_unit b_unit + bias."""
    y = (a.float() @ b.float().T) * (a_unit * b_unit)
    return (y if bias is None else y + bias.float()).bfloat16()


@product.register_fake
def _(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


@product.register_kernel("cuda")
def _(a: Tensor, b: Tensor, a_unit: Tensor, b_unit: Tensor, bias: Tensor | None, fast: bool) -> Tensor:
    if cublas.available() and cublas.suits(a, b):
        return cublas.multiply(a, b, right_turned=True, bias=bias, units=(a_unit, b_unit), fast=fast)
    return torch._scaled_mm(a, b.T, a_unit, b_unit, bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


@torch.library.custom_op("glassformer::fp8_loss_gradients", mutates_args=())
def loss_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As fused_loss.chunk_gradients, the gradient in e5m2 with GRADIENT_UNIT: (total, plain, gradient, transposed)."""
    from glassformer.kernels.cuda.training.fused_loss import chunk_gradients  # it is built on this module

    total, plain, gradient = chunk_gradients(logits.float(), targets, ignored, smoothing, z_loss, columns)
    g8 = quantise(gradient, GRADIENT_UNIT, E5M2)
    return total, plain, g8, _turned(g8)


@loss_gradients.register_fake
def _(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = logits.shape
    total, plain = (logits.new_empty((), dtype=torch.float32) for _ in range(2))
    return total, plain, logits.new_empty(rows, columns, dtype=E5M2), logits.new_empty(columns, rows, dtype=E5M2)


square_parts.register_kernel("cuda")(fp8_cuda.square_parts)
cast_all.register_kernel("cuda")(fp8_cuda.cast_all)
turn.register_kernel("cuda")(fp8_cuda.turn)
activate.register_kernel("cuda")(fp8_cuda.activate)
activate_backward.register_kernel("cuda")(fp8_cuda.activate_backward)
loss_gradients.register_kernel("cuda")(fp8_cuda.loss_gradients)


Cast = tuple[Tensor, Tensor, Tensor]
"""A matrix in 8 bits, the same transposed, and their unit."""


def cast_measured(x: Tensor, rows: int | None = None) -> Cast:
    """A matrix in e4m3 with its own unit; with rows of zeros below where `rows` are more than it has."""
    unit = unit_of(mean_squares([x], True)[0])
    return *cast_all([x], unit, E4M3, False, rows), unit


def head_gradients(
    hidden: Tensor, weight: Cast, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(total, plain, gradient of hidden (N,D), of the weight (V,D)) of a linear head and its loss, as fused_loss.py."""
    h8, h8_turned, h_unit = cast_measured(hidden)
    w8, w8_turned, w_unit = weight
    logits = product(h8, w8, h_unit, w_unit, None, FAST["forward"])
    total, plain, g8, g8_turned = loss_gradients(logits, targets, ignored, smoothing, z_loss, columns)
    g_unit = torch.full_like(h_unit, GRADIENT_UNIT)
    d_hidden = product(g8, w8_turned, g_unit, w_unit, None, FAST["inputs"])
    return total, plain, d_hidden, product(g8_turned, h8_turned, g_unit, h_unit, None, FAST["weights"])


def fill_rows(x: Tensor, value: float = 0) -> Tensor:
    """With as many further rows (or entries) as make their number a multiple of 16."""
    missing = -len(x) % MULTIPLE
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=value) if missing else x


def require_device(device: torch.device) -> None:
    """Refuse a device without products in 8 bits."""
    remedy = "use machine.products='precision'"
    if device.type != "cuda":
        raise ConfigError(
            f"machine.products='float8' needs a CUDA GPU, and this run is on the {device.type}: {remedy}."
        )
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"machine.products='float8' needs a GPU of compute capability 8.9 or more, and {name} has {major}.{minor}: "
            f"{remedy}."
        )
