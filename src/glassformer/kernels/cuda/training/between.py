"""What lies between the matmuls of a training step, in CUDA C++ (between.cu): norms, activations, rotations.

Matmuls read and write bfloat16; the residual stream is bfloat16 or float32. These functions compute values and
gradients; `blocks` makes autograd functions of them.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glassformer.kernels.toolchain import nvrtc

ACTIVATION_NAMES = ("relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh", "quick_gelu")
"""In the order of KIND in between.cu."""
THREADS, EACH = 256, 8
"""As in between.cu: threads of a block of elementwise kernels, and numbers of a thread."""
WIDEST, NARROW = 8192, 256
"""Widest row of a norm: a block has at most 1,024 threads. Rows up to `NARROW` share a block."""
BUSY, BUSY_BACKWARD = 768, 512
"""Threads of a multiprocessor that compute norms, or their gradients. Each requests its next row before it computes
this one; more blocks of the backward pass would leave more shares of the gradients of weights to add."""


class Arguments(ctypes.Structure):
    """The arguments struct of the kernels."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (
            "stream", "d_sum", "sum", "d_stream", "branch", "d_out", "weight", "bias", "branch_bias", "statistics",
            "parts", "out", "d_branch", "gate", "up", "d_gate", "d_up", "cosines", "sines",
        )),
        *((name, ctypes.c_int64) for name in ("count", "row_step")),
        *((name, ctypes.c_float) for name in ("eps", "offset", "sign")),
        *((name, ctypes.c_int) for name in ("columns", "tokens", "heads", "own_waves")),
    ]  # fmt: skip


KERNELS = (
    "norm_forward",
    "norm_backward",
    "activation_forward",
    "activation_backward",
    "rotate",
    "column_sums",
    "add_shares",
)
"""In the order of PART in between.cu."""


def launch(name: str, blocks: int, threads: int, macros: dict[str, int], **fields: Any) -> None:
    """Launch a kernel. Tensors among the fields are passed by their addresses; None is a null pointer."""
    values = {key: value.data_ptr() if isinstance(value, Tensor) else value for key, value in fields.items()}
    device = next(value for value in fields.values() if isinstance(value, Tensor)).device
    text = nvrtc.source(Path(__file__).parent, ("floats.cuh", "between.cu"), {"PART": KERNELS.index(name), **macros})
    nvrtc.kernel(text, name, device.index or 0).launch(Arguments(**values), blocks, threads)


class Norm(NamedTuple):
    """What a norm computes, but for its weight and bias."""

    centred: bool
    eps: float
    offset: float


def unsupported_width(width: int, normed: bool = True) -> str | None:
    """Return why rows of this width cannot be computed, and `normed`; None if they can."""
    if width % EACH:
        return f"rows of {width} numbers are not multiples of {EACH}"
    if normed and (width > WIDEST or (width <= NARROW and width & (width - 1))):
        return f"a norm over {width} numbers is not supported: give a power of two, or a multiple of 8 up to {WIDEST}"
    return None


def _shape(width: int, rows: int, device: torch.device, busy: int) -> tuple[int, int, int]:
    """Return (blocks, threads of a block, rows that a block computes at a time)."""
    lanes = width // EACH
    at_once = THREADS // lanes if width <= NARROW else 1
    threads = -(-lanes * at_once // 32) * 32
    most = _multiprocessors(device) * max(1, busy // threads)
    return min(most, -(-rows // at_once)), threads, at_once


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def norm_forward(
    stream: Tensor,
    branch: Tensor | None,
    branch_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    norm: Norm,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return stream + branch + branch_bias (or the stream itself), its norm in bfloat16, and statistics of each row."""
    width = stream.shape[-1]
    rows = stream.numel() // width
    out = torch.empty(stream.shape, dtype=torch.bfloat16, device=stream.device)
    total = stream if branch is None else torch.empty_like(stream)
    statistics = torch.empty(rows, 2, device=stream.device)
    blocks, threads, _ = _shape(width, rows, stream.device, BUSY)
    macros = _macros(stream, width, norm, branch is not None, branch_bias is not None)
    launch(
        "norm_forward", blocks, threads, macros,
        stream=stream, branch=branch, branch_bias=branch_bias, sum=total, weight=weight, bias=bias,
        statistics=statistics, out=out, count=rows, eps=norm.eps, offset=norm.offset,
    )  # fmt: skip
    return total, out, statistics


def norm_backward(
    d_out: Tensor,
    d_sum: Tensor | None,
    stream: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    norm: Norm,
    added: bool,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of stream, branch (in bfloat16), and of weight, bias and branch_bias together, (2 or 3, W).

    `stream` is the input of the norm. If no branch was `added`, the second result is the first. `biased`: with a bias.
    """
    width = stream.shape[-1]
    rows = stream.numel() // width
    blocks, threads, at_once = _shape(width, rows, stream.device, BUSY_BACKWARD)
    d_stream = torch.empty_like(stream)
    d_branch = torch.empty_like(d_out) if added and stream.dtype is torch.float32 else d_stream
    parts = torch.empty(blocks * at_once, 3 if biased else 2, width, device=stream.device)
    macros = _macros(stream, width, norm, added, biased) | {"RESIDUAL": int(d_sum is not None)}
    launch(
        "norm_backward", blocks, threads, macros,
        stream=stream, d_sum=d_sum, d_out=d_out, weight=weight, statistics=statistics, d_stream=d_stream,
        d_branch=d_branch, parts=parts, count=rows, offset=norm.offset,
    )  # fmt: skip
    return d_stream, d_branch, add_shares(parts)


def _macros(stream: Tensor, width: int, norm: Norm, added: bool, biased: bool) -> dict[str, int]:
    wide = stream.dtype is torch.float32
    return {
        "WIDE": int(wide), "WIDTH": width, "CENTRED": int(norm.centred), "ADD": int(added), "BIASED": int(biased),
    }  # fmt: skip


STRIPS = 4
"""Blocks of a multiprocessor that share the rows of a matrix whose columns are summed."""


def _strips(rows: int, columns: int, matrices: int, device: torch.device) -> tuple[int, int]:
    """Return (blocks, shares of each sum) for sums over the rows of so many matrices."""
    across = -(-columns // (EACH * THREADS)) * matrices
    strips = max(1, min(rows, STRIPS * _multiprocessors(device) // across))
    return strips * across, strips


def add_shares(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension of float32 (S,M,C). It is the same in each call."""
    out = torch.empty(parts.shape[1:], device=parts.device)
    columns = out.numel()
    launch(
        "add_shares",
        -(-columns // 32),
        512,
        {"WIDE": 0},
        parts=parts,
        statistics=out,
        count=len(parts),
        columns=columns,
    )
    return out


def column_sums(matrices: list[Tensor]) -> list[Tensor]:
    """Return the sums over the rows of up to three matrices of bfloat16, in float32."""
    if not matrices:
        return []
    rows, columns = matrices[0].shape
    if any(m.shape != matrices[0].shape for m in matrices):
        return [total for m in matrices for total in column_sums([m])]
    if columns % EACH:
        return [m.sum(0, dtype=torch.float32) for m in matrices]
    blocks, strips = _strips(rows, columns, len(matrices), matrices[0].device)
    parts = torch.empty(strips, len(matrices), columns, device=matrices[0].device)
    fields = dict(zip(("gate", "up", "branch"), (m.contiguous() for m in matrices), strict=False))
    macros = {"WIDE": 0, "MATRICES": len(matrices)}
    launch("column_sums", blocks, THREADS, macros, **fields, parts=parts, count=rows, columns=columns)
    return list(add_shares(parts))


def activation_forward(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """Return activation(gate) * up, or activation(gate). Both may be parts of wider rows."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _elementwise("activation_forward", gate, _activation_macros(gate, up, kind), gate=gate, up=up, out=out)
    return out


def activation_backward(
    d_out: Tensor, gate: Tensor, up: Tensor | None, kind: str, summed: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of gate and up next to each other (..., 2F) and, if they are to be `summed`, their sums.

    Without `up`, it is that of gate alone. The rows of gate and up are as far apart as those of the result.
    """
    columns, parts_of_row = gate.shape[-1], 1 if up is None else 2
    rows = gate.numel() // columns
    whole = torch.empty(*gate.shape[:-1], parts_of_row * columns, dtype=gate.dtype, device=gate.device)
    macros = _activation_macros(gate, up, kind) | {"SUMMED": int(summed)}
    d_gate, d_up = whole[..., :columns], whole[..., -columns:]
    fields = {"gate": gate, "up": up, "d_out": d_out, "d_gate": d_gate, "d_up": d_up}
    if not summed:
        _elementwise("activation_backward", gate, macros, **fields)
        return whole, []
    blocks, strips = _strips(rows, columns, 1, gate.device)
    parts = torch.empty(strips, parts_of_row, columns, device=gate.device)
    launch("activation_backward", blocks, THREADS, macros, **fields, parts=parts, count=rows, columns=columns)
    return whole, list(add_shares(parts))


def _activation_macros(gate: Tensor, up: Tensor | None, kind: str) -> dict[str, int]:
    width = gate.shape[-1]
    step = width if up is None else 2 * width
    assert gate.stride(-2) == step
    assert up is None or up.stride() == gate.stride()
    kinds = {"KIND": ACTIVATION_NAMES.index(kind), "GATED": int(up is not None)}
    return {"WIDE": 0, "WIDTH": width, "STEP": step, **kinds}


def supports_rotation(width: int, rotated: int) -> bool:
    """Return whether heads of this width, of which `rotated` numbers are rotated, are supported by `rotate`."""
    return width % EACH == 0 and rotated % (2 * EACH) == 0 and rotated <= width


def rotate(x: Tensor, out: Tensor, heads: int, width: int, waves: Sequence[Tensor], halves: bool, sign: float) -> None:
    """Rotate the first heads of each token of x (B,T,C); with sign -1 back. `waves`: cosines and sines (1 or B, T, P).

    `out` has the strides of x, or is x. What is not rotated is not written.
    """
    cosines, sines = waves
    wide = int(cosines.dtype is torch.float32)
    macros = {"WIDE": 0, "WIDTH": width, "ROTATED": 2 * cosines.shape[-1], "HALVES": int(halves), "WIDE_WAVES": wide}
    groups = x.shape[0] * x.shape[1] * heads * cosines.shape[-1] // EACH
    launch(
        "rotate", -(-groups // THREADS), THREADS, macros, stream=x, out=out, cosines=cosines, sines=sines, sign=sign,
        tokens=x.shape[1], heads=heads, own_waves=int(len(cosines) > 1), row_step=x.stride(1), count=groups,
    )  # fmt: skip


def _elementwise(name: str, x: Tensor, macros: dict[str, int], **fields: Any) -> None:
    groups = x.numel() // EACH
    launch(name, -(-groups // THREADS), THREADS, macros, **fields, count=groups)
