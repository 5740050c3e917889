"""Cross-entropy and its gradient for one chunk of logits, in CUDA C++ (loss.cu).

The kernel reads the logits from global memory once and writes the gradient once. A row of logits that does not fit into
half of a multiprocessor's shared memory is read twice. Logits are bfloat16. The gradient is bfloat16 too, or float8
(e5m2) for the matmuls of fp8.py.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from glassformer.kernels.toolchain import nvrtc
from glassformer.kernels.toolchain.operator import operator

FOLDER = Path(__file__).parent
THREADS = 512
MAX_ROW_BYTES = 110 * 1024
"""Longest row of logits that stays in shared memory: two blocks share the 227 KB of a multiprocessor."""


class Arguments(ctypes.Structure):
    """The arguments struct of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "gradients", "targets", "totals", "plains")),
        ("ignored", ctypes.c_int64),
        ("smoothing", ctypes.c_float),
        ("z_loss", ctypes.c_float),
    ]


def source(columns: int, stride: int, smoothed: bool, float8_factor: int = 0) -> str:
    """Return the CUDA source. `float8_factor` multiplies gradients in e5m2; 0 means gradients in bfloat16."""
    sizes = {"COLUMNS": columns, "STRIDE": stride, "KEPT": int(stays_in_shared_memory(stride)), "THREADS": THREADS}
    sizes |= {"SMOOTHED": int(smoothed), "EIGHT": float8_factor}
    files = ("floats.cuh", "float8.cuh", "loss.cu") if float8_factor else ("floats.cuh", "loss.cu")
    return nvrtc.source(FOLDER, files, sizes)


def stays_in_shared_memory(stride: int) -> bool:
    """Return whether a row of `stride` logits stays in shared memory between the two passes."""
    return 2 * stride <= MAX_ROW_BYTES


def write_gradients(
    logits: Tensor,
    gradients: Tensor,
    targets: Tensor,
    ignored: int,
    smoothing: float,
    z_loss: float,
    columns: int,
    float8_factor: int = 0,
) -> Tensor:
    """Fill `gradients` and return the total and the plain loss of each row (2, N)."""
    logits, targets = logits.contiguous(), targets.contiguous()
    stride = logits.shape[1]
    assert logits.dtype is torch.bfloat16
    assert stride % 8 == 0, "rows are read 16 bytes at a time"
    losses = torch.empty(2, len(logits), device=logits.device)
    text = source(columns, stride, smoothing != 0, float8_factor)
    kernel = nvrtc.kernel(text, "loss", logits.device.index or 0, 2 * stride if stays_in_shared_memory(stride) else 0)
    tensors = (logits, gradients, targets, losses[0], losses[1])
    kernel.launch(Arguments(*(t.data_ptr() for t in tensors), ignored, smoothing, z_loss), len(logits), THREADS)
    return losses


def definition(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in float32: losses of each row (2, N) and the gradient with respect to the logits.

    With p = softmax(z), V = `columns` classes, target y, smoothing e and z-loss weight w, lse = logsumexp(z):

        loss   = (1 - e) (lse - z_y) + e (lse - mean(z)) + w lse^2
        d/dz_k = p_k (1 + 2 w lse) - (1 - e) [k = y] - e / V
    """
    z, counted = logits[:, :columns].float(), targets != ignored
    target = torch.where(counted, targets, 0)[:, None]
    lse = z.logsumexp(1)
    plain = lse - z.gather(1, target)[:, 0]
    total = (1 - smoothing) * plain + smoothing * (lse - z.mean(1)) + z_loss * lse.square()
    gradient = (z - lse[:, None]).exp() * (1 + 2 * z_loss * lse)[:, None] - smoothing / columns
    gradient = gradient.scatter_add(1, target, torch.full_like(plain, smoothing - 1)[:, None])
    gradient = torch.where(counted[:, None], gradient, 0.0)
    losses = torch.where(counted, torch.stack([total, plain]), 0.0)
    return losses, torch.nn.functional.pad(gradient, (0, logits.shape[1] - columns))


def _rows_on_gpu(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor]:
    gradients = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return write_gradients(logits, gradients, targets, ignored, smoothing, z_loss, columns), gradients


@operator(_rows_on_gpu)
def loss_rows(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor]:
    """Return the losses of each row (2, N), and the gradient in the dtype of the logits."""
    losses, gradient = definition(logits, targets, ignored, smoothing, z_loss, columns)
    return losses, gradient.to(logits.dtype)


def head_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: tuple[int, float, float],
    columns: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """As `training.chunked_loss.head_gradients`, with the loss and its gradient by the kernel."""
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    losses, gradient = loss_rows(logits, targets, *settings, columns)
    total, plain = losses.sum(1)
    d_bias = None if bias is None else gradient.sum(0, dtype=torch.float32)
    if logits.is_cuda and not torch.compiler.is_compiling():  # in float32 from the matmul on
        return total, plain, gradient @ weight, torch.mm(gradient.T, hidden, out_dtype=torch.float32), d_bias
    return total, plain, gradient @ weight, gradient.T @ hidden, d_bias
