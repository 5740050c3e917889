"""A step of AdamW over all tensors of a group as one pass in CUDA C++ (adamw.cu), and the norm of all gradients.

torch's fused AdamW also writes the clipped gradient back. The state is that of torch (`step`, `exp_avg`, `exp_avg_sq`),
so checkpoints do not depend on which of them ran. The step writes the copies of parameters in bfloat16 (`copies`), and
gradients may be bfloat16, as matmuls write them.

torch computes the norm of each gradient with a launch of its own, hundreds in a step. Here there are a few for all.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import copies
from glassformer.kernels.toolchain import nvrtc

MOST, THREADS, EACH, SQUARED = 64, 256, 8, 64
"""As in adamw.cu: most tensors of a launch, threads of a block, numbers of a thread in a step and in a norm."""
ALIGNED = 16
"""Bytes: a thread reads four numbers at once."""


class Arguments(ctypes.Structure):
    """The arguments struct of the kernel."""

    _fields_ = [
        *((name, ctypes.c_void_p * MOST) for name in ("parameter", "gradient", "copy", "mean", "square", "step")),
        ("numbers", ctypes.c_int64 * MOST),
        ("narrow", ctypes.c_uint64),
        ("first", ctypes.c_int32 * MOST),
        ("tensors", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("rate", "scale", "failed", "parts")),
        *((name, ctypes.c_float) for name in ("decay", "taken1", "beta2", "taken2", "epsilon")),
        *((name, ctypes.c_double) for name in ("log_beta1", "log_beta2")),
    ]


class AdamW(Protocol):
    """What is needed of `training.optimizers.AdamW`."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Tensor]]: ...

    def state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]: ...


def supports_call(optimizer: AdamW) -> bool:
    """Return whether the kernel supports the parameters, gradients and state of an optimizer.

    They are unsharded float32 tensors on a GPU; gradients may be bfloat16. State that the first step is to create has
    the layout of its parameter.
    """
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    if not all(isinstance(rate, Tensor) and rate.is_cuda for rate in rates) or not nvrtc.is_available():
        return False
    updated = [p for group in groups for p in group["params"] if p.grad is not None]
    tensors = (t for p in updated for t in (p, *optimizer.state.get(p, {}).values()))
    return all(map(_plain, tensors)) and all(_plain(p.grad) or _narrow(p.grad) for p in updated)


def _plain(t: Tensor) -> bool:
    return nvrtc.is_plain(t) and (t.dim() == 0 or t.data_ptr() % ALIGNED == 0)


def _narrow(t: Tensor) -> bool:
    aligned = t.is_contiguous() and t.data_ptr() % ALIGNED == 0
    return t.is_cuda and t.dtype is torch.bfloat16 and type(t.data) is Tensor and aligned


def _state(optimizer: AdamW, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    held = optimizer.state_of(parameter, group)
    return held["exp_avg"], held["exp_avg_sq"], held["step"]


@torch.no_grad()
def step(optimizer: AdamW, failed: Tensor | None, shrink: Tensor | None) -> None:
    """Do a step with gradients times `shrink`, unless `failed` is 1. The decision is made on the device.

    The first step creates the state, and the copies that matmuls read.
    """
    for group in optimizer.param_groups:
        updated = [p for p in group["params"] if p.grad is not None]
        copies.make(updated)
        states = [_state(optimizer, p, group) for p in updated]
        counts = [count for *_, count in states]
        if counts:
            torch._foreach_add_(counts, 1)
        if counts and failed is not None:  # a captured step must not read it: the count goes back where it is 1
            torch._foreach_sub_(counts, [failed] * len(counts))
        for at in range(0, len(updated), MOST):
            _launch(updated[at : at + MOST], states[at : at + MOST], group, failed, shrink)


def _launch(
    parameters: list[Tensor],
    states: list[tuple[Tensor, Tensor, Tensor]],
    group: dict[str, Any],
    failed: Tensor | None,
    shrink: Tensor | None,
) -> None:
    written = [getattr(p, copies.COPY, None) for p in parameters]
    beta1, beta2 = group["betas"]
    given, blocks = _arguments([p.grad for p in parameters if p.grad is not None], EACH)
    fields = {
        "parameter": nvrtc.addresses(parameters, MOST),
        "copy": (ctypes.c_void_p * MOST)(*(None if copy is None else copy.data_ptr() for copy in written)),
        "mean": nvrtc.addresses([mean for mean, _, _ in states], MOST),
        "square": nvrtc.addresses([square for _, square, _ in states], MOST),
        "step": nvrtc.addresses([count for *_, count in states], MOST),
        "rate": nvrtc.address(group["lr"]), "scale": nvrtc.address(shrink), "failed": nvrtc.address(failed),
        "decay": group["weight_decay"], "taken1": 1 - beta1, "beta2": beta2, "taken2": 1 - beta2,
        "epsilon": group["eps"],
        "log_beta1": math.log(beta1) if beta1 else -math.inf,
        "log_beta2": math.log(beta2) if beta2 else -math.inf,
    }  # fmt: skip
    for name, value in fields.items():
        setattr(given, name, value)
    _kernel("adamw", parameters[0].device).launch(given, blocks, THREADS)


def _arguments(gradients: Sequence[Tensor], each: int) -> tuple[Arguments, int]:
    """Return the arguments struct of a launch with its gradients, and the number of blocks of `each` per thread."""
    blocks = [-(-t.numel() // (THREADS * each)) for t in gradients]
    given = Arguments(
        gradient=nvrtc.addresses(gradients, MOST),
        narrow=sum(1 << n for n, t in enumerate(gradients) if t.dtype is torch.bfloat16),
        numbers=(ctypes.c_int64 * MOST)(*(t.numel() for t in gradients)),
        first=(ctypes.c_int32 * MOST)(*(sum(blocks[:n]) for n in range(len(blocks)))),
        tensors=len(gradients),
    )
    return given, sum(blocks)


def _kernel(name: str, device: torch.device) -> Any:
    text = nvrtc.source(Path(__file__).parent, ("adamw.cu",), {"MOST": MOST})
    return nvrtc.kernel(text, name, device.index or 0)


def supports_norm(gradients: Sequence[Tensor]) -> bool:
    """Return whether `norm` supports these gradients: unsharded float32 or bfloat16 on a GPU."""
    on_gpu = bool(gradients) and all(t.is_cuda for t in gradients)
    return on_gpu and nvrtc.is_available() and all(_plain(t) or _narrow(t) for t in gradients)


@torch.no_grad()
def norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together, summed in a fixed order."""
    launches = [_arguments(gradients[at : at + MOST], SQUARED) for at in range(0, len(gradients), MOST)]
    parts = torch.empty(sum(blocks for _, blocks in launches), device=gradients[0].device)
    kernel, first = _kernel("squares", parts.device), 0
    for given, blocks in launches:
        given.parts = parts.data_ptr() + first * parts.element_size()
        kernel.launch(given, blocks, THREADS)
        first += blocks
    return parts.sum().sqrt()
