"""Muon's passes over its matrices in CUDA C++ (muon.cu): momentum before they are orthogonalised, the step after."""

import ctypes

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import fused_loss_cuda
from glassformer.kernels.toolchain import nvrtc

MOST, THREADS, EACH = 64, 256, 8
"""As in muon.cu: matrices of a launch, threads of a block and numbers of a thread."""


class Given(ctypes.Structure):
    """The kernels' argument."""

    _fields_ = [
        *((name, ctypes.c_void_p * MOST) for name in ("gradient", "momentum", "matrix")),
        *((name, ctypes.c_void_p) for name in ("stack", "rate", "scale", "failed")),
        *((name, ctypes.c_float) for name in ("taken", "decay", "factor")),
        ("numbers", ctypes.c_int32),
    ]


def fits(matrices: list[Tensor], rate: float | Tensor) -> bool:
    """Whether the kernels take them: whole matrices of float32 on a GPU, with a rate that lies there, too."""
    there = isinstance(rate, Tensor) and rate.is_cuda and fused_loss_cuda.can_compile()
    of_them = (t for p in matrices for t in (p, p.grad) if t is not None)
    return there and all(_plain(t) for t in of_them)


def _plain(t: Tensor) -> bool:
    alone = type(t.data) is Tensor  # no part of a matrix that lies on several devices
    return alone and t.is_cuda and t.dtype is torch.float32 and t.is_contiguous() and t.numel() % EACH == 0


def look_ahead(
    gradients: list[Tensor], buffers: list[Tensor], momentum: float, scale: Tensor | None, failed: Tensor | None
) -> Tensor:
    """As Muon's pass of the same name: momenta are made new in place, the stack is new."""
    stack = torch.empty((len(gradients), *gradients[0].shape), dtype=torch.bfloat16, device=gradients[0].device)
    for first in range(0, len(gradients), MOST):
        some = slice(first, first + MOST)
        given = Given(
            gradient=_addresses(gradients[some]),
            momentum=_addresses(buffers[some]),
            stack=stack[some].data_ptr(),
            scale=_address(scale),
            failed=_address(failed),
            taken=1 - momentum,
        )
        _launch("look_ahead", given, gradients[some])
    return stack


def move(
    matrices: list[Tensor], stack: Tensor, rate: Tensor, decay: float, factor: float, failed: Tensor | None
) -> None:
    """w <- (1 - rate decay) w - rate factor o, for each matrix w and its o of the stack; nothing if `failed` is 1."""
    stack = stack.contiguous()
    for first in range(0, len(matrices), MOST):
        some = slice(first, first + MOST)
        given = Given(
            matrix=_addresses(matrices[some]),
            stack=stack[some].data_ptr(),
            rate=_address(rate),
            failed=_address(failed),
            decay=decay,
            factor=factor,
        )
        _launch("move", given, matrices[some])


def _launch(name: str, given: Given, some: list[Tensor]) -> None:
    given.numbers = some[0].numel()
    text = fused_loss_cuda.with_macros({"MOST": MOST}, "muon.cu")
    blocks = len(some) * -(-given.numbers // (THREADS * EACH))
    nvrtc.kernel(text, name, some[0].device.index or 0).launch(given, blocks, THREADS)


def _addresses(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * MOST)(*(t.data_ptr() for t in tensors))


def _address(number: Tensor | None) -> int | None:
    if number is None:
        return None
    assert number.dtype is torch.float32
    assert number.numel() == 1
    return number.data_ptr()
