"""The elementwise passes of Muon in CUDA C++ (muon.cu): momentum before orthogonalization, the update after it."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from glassformer.kernels.toolchain import nvrtc

MOST, THREADS, EACH = 64, 256, 8
"""As in muon.cu: most matrices of a launch, threads of a block, numbers of a thread."""


class Arguments(ctypes.Structure):
    """The arguments struct of the kernels."""

    _fields_ = [
        *((name, ctypes.c_void_p * MOST) for name in ("gradient", "momentum", "matrix")),
        *((name, ctypes.c_void_p) for name in ("stack", "rate", "scale", "failed")),
        *((name, ctypes.c_float) for name in ("taken", "decay", "factor")),
        ("numbers", ctypes.c_int32),
    ]


def supports_call(matrices: list[Tensor], rate: float | Tensor) -> bool:
    """Return whether the kernels support these: unsharded float32 matrices and a learning rate on a GPU."""
    ready = isinstance(rate, Tensor) and rate.is_cuda and nvrtc.is_available()
    tensors = (t for p in matrices for t in (p, p.grad) if t is not None)
    return ready and all(nvrtc.is_plain(t) and t.numel() % EACH == 0 for t in tensors)


def look_ahead(
    gradients: list[Tensor], buffers: list[Tensor], momentum: float, scale: Tensor | None, failed: Tensor | None
) -> Tensor:
    """As `Muon._look_ahead`: update the momentum buffers in place and return the new stack in bfloat16."""
    stack = torch.empty((len(gradients), *gradients[0].shape), dtype=torch.bfloat16, device=gradients[0].device)
    for first in range(0, len(gradients), MOST):
        some = slice(first, first + MOST)
        given = Arguments(
            gradient=nvrtc.addresses(gradients[some], MOST),
            momentum=nvrtc.addresses(buffers[some], MOST),
            stack=stack[some].data_ptr(),
            scale=nvrtc.address(scale),
            failed=nvrtc.address(failed),
            taken=1 - momentum,
        )
        _launch("look_ahead", given, gradients[some])
    return stack


def move(
    matrices: list[Tensor], stack: Tensor, rate: Tensor, decay: float, factor: float, failed: Tensor | None
) -> None:
    """w <- (1 - rate decay) w - rate factor o, for each matrix w and its o in the stack. No change if `failed` is 1."""
    stack = stack.contiguous()
    for first in range(0, len(matrices), MOST):
        some = slice(first, first + MOST)
        given = Arguments(
            matrix=nvrtc.addresses(matrices[some], MOST),
            stack=stack[some].data_ptr(),
            rate=nvrtc.address(rate),
            failed=nvrtc.address(failed),
            decay=decay,
            factor=factor,
        )
        _launch("move", given, matrices[some])


def _launch(name: str, given: Arguments, some: list[Tensor]) -> None:
    given.numbers = some[0].numel()
    text = nvrtc.source(Path(__file__).parent, ("muon.cu",), {"MOST": MOST})
    blocks = len(some) * -(-given.numbers // (THREADS * EACH))
    nvrtc.kernel(text, name, some[0].device.index or 0).launch(given, blocks, THREADS)
