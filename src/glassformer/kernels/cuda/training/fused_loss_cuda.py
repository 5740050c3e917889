"""The chunk kernel of fused_loss.py in CUDA C++ (loss.cu): logits read from memory once, the gradient written once.

Rows that do not fit a multiprocessor's shared memory twice are read twice. Logits are bfloat16; the gradient is too, or
is e5m2 for the products of fp8.py.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glassformer.kernels.toolchain import nvrtc

THREADS = 512
MOST_BYTES = 110 * 1024
"""Of a row: two blocks of a multiprocessor share 227 KB."""


class Given(ctypes.Structure):
    """The kernel's argument."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "gradients", "targets", "totals", "plains")),
        ("ignored", ctypes.c_int64),
        ("smoothing", ctypes.c_float),
        ("z_loss", ctypes.c_float),
    ]


@cache
def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


def with_macros(macros: Mapping[str, int], *files: str) -> str:
    """Files of this folder as one text, with numbers for the names they leave open."""
    return nvrtc.with_macros(macros, map(_text, files))


def can_compile() -> bool:
    """Whether there is a compiler; torch for GPUs of other makers comes without."""
    try:
        nvrtc.code_path("", (9, 0))
    except nvrtc.CudaError:
        return False
    return True


def source(columns: int, stride: int, smoothed: bool, eight: int = 0) -> str:
    """`eight`: what gradients in e5m2 are multiplied by; 0 for bfloat16."""
    sizes = {"COLUMNS": columns, "STRIDE": stride, "KEPT": int(kept(stride)), "THREADS": THREADS}
    sizes |= {"SMOOTHED": int(smoothed), "EIGHT": eight}
    return with_macros(sizes, "floats.cuh", *(("eight.cuh",) if eight else ()), "loss.cu")


def fits(logits: Tensor) -> bool:
    """Whether rows are what the kernel takes."""
    return logits.dtype is torch.bfloat16 and logits.shape[1] % 8 == 0


def kept(stride: int) -> bool:
    """Whether a row stays in shared memory between the passes."""
    return 2 * stride <= MOST_BYTES


def arguments(
    logits: Tensor, gradients: Tensor, targets: Tensor, rows: Tensor, ignored: int, smoothing: float, z_loss: float
) -> Given:
    """`rows`: (2, N), where totals and plain losses of each row go."""
    tensors = (logits, gradients, targets, rows[0], rows[1])
    return Given(*(t.data_ptr() for t in tensors), ignored, smoothing, z_loss)


def write_gradients(
    logits: Tensor,
    gradients: Tensor,
    targets: Tensor,
    ignored: int,
    smoothing: float,
    z_loss: float,
    columns: int,
    eight: int = 0,
) -> Tensor:
    """Fill `gradients`; totals and plain losses of each row (2, N)."""
    logits, targets = logits.contiguous(), targets.contiguous()
    rows = torch.empty(2, len(logits), device=logits.device)
    stride = logits.shape[1]
    text, shared = source(columns, stride, smoothing != 0, eight), 2 * stride if kept(stride) else 0
    loss = nvrtc.kernel(text, "loss", logits.device.index or 0, shared)
    loss.launch(arguments(logits, gradients, targets, rows, ignored, smoothing, z_loss), len(logits), THREADS)
    return rows


@torch.library.custom_op("glassformer::loss_rows", mutates_args=())
def loss_rows(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor]:
    """(totals and plain losses of each row (2, N), gradient); opaque to the compiler, which calls it as it is."""
    gradients = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return write_gradients(logits, gradients, targets, ignored, smoothing, z_loss, columns), gradients


@loss_rows.register_fake
def _(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int
) -> tuple[Tensor, Tensor]:
    return logits.new_empty((2, len(logits)), dtype=torch.float32), torch.empty_like(logits)


def chunk_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As fused_loss.chunk_gradients. What is not bfloat16 goes to the Triton kernel, which reads everything twice."""
    if not fits(logits):
        from glassformer.kernels.cuda.training import fused_loss_triton

        return fused_loss_triton.chunk_gradients(logits, targets, ignored, smoothing, z_loss, columns)
    rows, gradients = loss_rows(logits, targets, ignored, smoothing, z_loss, columns or logits.shape[1])
    total, plain = rows.sum(1)
    return total, plain, gradients
