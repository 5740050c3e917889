"""Matmuls in float8: formats, scales, and the operators that fp8_layers.py and the loss are built of.

`machine.products = "float8"` asks for them. Tensors are rounded to 8 bits just before a matmul and nowhere else:
weights, their gradients, optimizer, norms, attention and the residual stream keep their dtype.

    e4m3   weights and activations   1 + 4 + 3 bits, to 448     relative rounding error up to 2^-4
    e5m2   gradients                 1 + 5 + 2 bits, to 57344   relative rounding error up to 2^-3

A tensor x is stored as x8 = round(x / scale), and the result of a matmul is multiplied by both scales. A scale is a
power of two, so dividing by it is exact. It is the root mean square of x, rounded down: a typical value becomes 1. That
leaves a factor of 448 (57344) above it before values saturate and 2^-9 (2^-16) below it before they vanish. Scales are
not carried from step to step (resuming stays exact), and no pass looks for a maximum. With ms the mean square:

    weights                            measured
    large activations and gradients    measured on an eighth of the tensor (`sample`)
    the output of a norm               ms(gain) + ms(bias), as its rows have mean square 1 before these
    hidden layer of a feed-forward     expected for independent factors: ms(x W^T + b) = D ms(x) ms(W) + ms(b)

Infinite values become NaN and stay visible.

The tensor cores of a GPU read both operands along the summed dimension. Weight gradients sum over tokens, so their
operands are needed transposed, and casts write both layouts. The functions here define what fp8_cuda.py does in one
pass on a GPU (test_fp8_cuda.py compares them); on a CPU they run in tests only. None waits for the device.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.kernels.cuda.training import fp8_cuda, loss
from glassformer.kernels.cuda.training.fp8_cuda import E4M3, E5M2, GRADIENT_SCALE, MULTIPLE
from glassformer.kernels.toolchain.operator import operator
from glassformer.model.layers import ACTIVATIONS

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-60, 2.0**60
SLOPES = {
    "relu": lambda y: (y > 0).to(y.dtype),
    "relu2": lambda y: 2 * y.relu(),
    "silu": lambda y: torch.ops.aten.silu_backward(torch.ones_like(y), y),
    "gelu_tanh": lambda y: torch.ops.aten.gelu_backward(torch.ones_like(y), y, approximate="tanh"),
    "gelu": lambda y: torch.ops.aten.gelu_backward(torch.ones_like(y), y),
    "tanh": lambda y: 1 - y.tanh().square(),
}
"""Derivatives of the activations."""


def mean_square(x: Tensor) -> Tensor:
    """Return the mean square in float32, over the last dimension first."""
    return x.float().square().mean(-1).mean()


def sample(x: Tensor) -> Tensor:
    """Return one line of 128 bytes of every eight. A hash chooses it, so periodic data are sampled fairly."""
    size = 128 // x.element_size()
    lines = x.reshape(-1)[: x.numel() // (8 * size) * 8 * size].view(-1, 8, size)
    group = torch.arange(len(lines), device=x.device)
    return lines[group, (group * 2654435761 % 2**32) >> 29]


def scale_of(ms: Tensor) -> Tensor:
    """Return the largest power of two up to the root of a mean square; 1 for zero, NaN for NaN or infinity."""
    rms = ms.sqrt()
    power = (rms.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    return torch.where(rms.isfinite(), torch.where(rms == 0, 1.0, power), torch.nan)


def quantise(x: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return x / scale in float8: rounded to nearest (ties to even), saturating; NaN where x is NaN or infinite."""
    y = x.float() * (1 / scale)  # exact for a power of two, and a fifth faster than a division in a norm's kernel
    limit = LARGEST[dtype]
    return (y.clamp(-limit, limit) + 0 * y).to(dtype)  # infinity times zero is NaN


def _transposed(x: Tensor) -> Tensor:
    """Return the transpose as a contiguous copy, also for a single row."""
    return x.T.clone(memory_format=torch.contiguous_format)


@operator(fp8_cuda.square_parts)
def square_parts(tensors: list[Tensor], sampled: bool) -> Tensor:
    """Return parts of the mean square, one row per tensor, which torch.compile adds up where it needs the sum."""
    large = [sampled and t.numel() >= fp8_cuda.SAMPLED_FROM for t in tensors]
    squares = [mean_square(sample(t) if some else t) for t, some in zip(tensors, large, strict=True)]
    return F.pad(torch.stack(squares)[:, None], (0, fp8_cuda.PARTS - 1))


def mean_squares(tensors: list[Tensor], sampled: bool) -> Tensor:
    """Return the mean squares of up to four tensors. `sampled`: read an eighth of each large tensor."""
    return square_parts(tensors, sampled).sum(1)


@operator(fp8_cuda.cast_all)
def cast_all(
    parts: list[Tensor], scale: Tensor, dtype: torch.dtype, side_by_side: bool, rows: int | None
) -> tuple[Tensor, Tensor]:
    """Concatenate along dim 0 (or 1 if `side_by_side`), cast to float8, and return the row-major and transposed copy.

    `rows` pads the result with rows of zeros to that number.
    """
    x8 = quantise(torch.cat(parts, int(side_by_side)), scale, dtype)
    if rows is not None:
        x8 = torch.cat([x8, x8.new_zeros(rows - len(x8), x8.shape[1])])
    return x8, _transposed(x8)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a matrix in float8, row-major and transposed."""
    return cast_all([x], scale, dtype, False, None)


@operator(fp8_cuda.transpose)
def transpose(x: Tensor) -> Tensor:
    """Return the transpose of a float8 matrix as a contiguous copy."""
    return _transposed(x)


@operator(fp8_cuda.activate)
def activate(pre: Tensor, scale: Tensor, kind: str) -> Tensor:
    """Return activation(pre) in e4m3."""
    return quantise(ACTIVATIONS[kind](pre.float()), scale, E4M3)


@operator(fp8_cuda.activate_backward)
def activate_backward(
    d_post: Tensor, pre: Tensor, scale: Tensor, post_scale: Tensor, kind: str, summed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four tensors: the gradient of pre in e5m2, its transpose, activation(pre) in e4m3 transposed, and the
    float32 sum of the gradient over rows (empty unless `summed`)."""
    post, d_pre = ACTIVATIONS[kind](pre.float()), d_post.float() * SLOPES[kind](pre.float())
    d_pre8 = quantise(d_pre, scale, E5M2)
    sums = d_pre.sum(0) if summed else d_pre.new_empty(0)
    return d_pre8, _transposed(d_pre8), _transposed(quantise(post, post_scale, E4M3)), sums


@operator()
def matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return a b^T a_scale b_scale + bias in bfloat16, for a (M,K) and b (N,K) in float8.

    On a GPU it sums in the short accumulator of the tensor cores.
    """
    return torch._scaled_mm(a, b.T, a_scale, b_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True)


@operator(fp8_cuda.loss_gradients)
def loss_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `loss.loss_rows`, with the gradient in e5m2 and GRADIENT_SCALE: (total, plain, gradient, its transpose)."""
    losses, gradient = loss.definition(logits, targets, ignored, smoothing, z_loss, columns)
    total, plain = losses.sum(1)
    g8 = quantise(gradient, GRADIENT_SCALE, E5M2)
    return total.clone(), plain.clone(), g8, _transposed(g8)


Cast = tuple[Tensor, Tensor, Tensor]
"""A matrix in float8, its transpose, and their scale."""


def cast_measured(x: Tensor, rows: int | None = None) -> Cast:
    """Return a matrix in e4m3 with its measured scale, padded with zeros to `rows` rows."""
    scale = scale_of(mean_squares([x], True)[0])
    return *cast_all([x], scale, E4M3, False, rows), scale


def head_gradients(
    hidden: Tensor,
    weight: Cast,
    bias: None,
    targets: Tensor,
    settings: tuple[int, float, float],
    columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """As `training.chunked_loss.head_gradients`, for a head without a bias whose weight is cast to float8.

    Padded rows of `hidden` have ignored targets, so they add nothing to any gradient.
    """
    assert bias is None
    n_rows, hidden, targets = len(hidden), pad_rows(hidden), pad_rows(targets, settings[0])
    h8, h8_transposed, h_scale = cast_measured(hidden)
    w8, w8_transposed, w_scale = weight
    logits = matmul(h8, w8, h_scale, w_scale, None)
    total, plain, g8, g8_transposed = loss_gradients(logits, targets, *settings, columns)
    g_scale = torch.full_like(h_scale, GRADIENT_SCALE)
    d_hidden = matmul(g8, w8_transposed, g_scale, w_scale, None)[:n_rows]
    return total, plain, d_hidden, matmul(g8_transposed, h8_transposed, g_scale, h_scale, None), None


def pad_rows(x: Tensor, value: float = 0) -> Tensor:
    """Pad with rows (or entries) to a multiple of 16."""
    missing = -len(x) % MULTIPLE
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing), value=value) if missing else x


def unsupported_device(device: torch.device) -> str | None:
    """Return why a device has no float8 matmuls, or None."""
    if device.type != "cuda":
        return f"machine.products='float8' needs a CUDA GPU, and this run is on the {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return (
            f"machine.products='float8' needs a GPU of compute capability 8.9 or more, and {name} has {major}.{minor}"
        )
    return None
