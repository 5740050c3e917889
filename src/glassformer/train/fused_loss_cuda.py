"""The chunk kernel of fused_loss.py in CUDA C++ (loss.cu): logits read from memory once, the gradient written once.

Rows that do not fit a multiprocessor's shared memory twice, and other types than bfloat16, go to the Triton kernel,
which reads them twice. The gradient is written in bfloat16, or in e5m2 for the products of fp8.py.
"""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from glassformer import nvrtc

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
    return "\n".join([*(f"#define {name} {value}" for name, value in macros.items()), *map(_text, files)])


def source(columns: int, smoothed: bool, eight: int = 0) -> str:
    """`eight`: what gradients in e5m2 are multiplied by; 0 for bfloat16."""
    sizes = {"COLUMNS": columns, "THREADS": THREADS, "SMOOTHED": int(smoothed), "EIGHT": eight}
    return with_macros(sizes, *(("eight.cuh", "loss.cu") if eight else ("loss.cu",)))


def fits(logits: Tensor) -> bool:
    """Whether rows are what the kernel takes."""
    return logits.dtype is torch.bfloat16 and logits.shape[1] % 8 == 0 and 2 * logits.shape[1] <= MOST_BYTES


def arguments(
    logits: Tensor, gradients: Tensor, targets: Tensor, rows: Tensor, ignored: int, smoothing: float, z_loss: float
) -> Given:
    """`rows`: (2, N), where totals and plain losses of each row go."""
    tensors = (logits, gradients, targets, rows[0], rows[1])
    return Given(*(t.data_ptr() for t in tensors), ignored, smoothing, z_loss)


def write_gradients(
    logits: Tensor, gradients: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, eight: int = 0
) -> Tensor:
    """Fill `gradients`; totals and plain losses of each row (2, N)."""
    logits, targets = logits.contiguous(), targets.contiguous()
    rows = torch.empty(2, len(logits), device=logits.device)
    columns = logits.shape[1]
    loss = nvrtc.kernel(source(columns, smoothing != 0, eight), "loss", logits.device.index or 0, 2 * columns)
    loss.launch(arguments(logits, gradients, targets, rows, ignored, smoothing, z_loss), len(logits), THREADS)
    return rows


@torch.library.custom_op("glassformer::loss_rows", mutates_args=())
def loss_rows(logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """(totals and plain losses of each row (2, N), gradient); opaque to the compiler, which calls it as it is."""
    gradients = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    return write_gradients(logits, gradients, targets, ignored, smoothing, z_loss), gradients


@loss_rows.register_fake
def _(logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    return logits.new_empty((2, len(logits)), dtype=torch.float32), torch.empty_like(logits)


def chunk_gradients(
    logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As fused_loss.chunk_gradients."""
    if not fits(logits):
        from glassformer.train import fused_loss_triton

        return fused_loss_triton.chunk_gradients(logits, targets, ignored, smoothing, z_loss)
    rows, gradients = loss_rows(logits, targets, ignored, smoothing, z_loss)
    total, plain = rows.sum(1)
    return total, plain, gradients
