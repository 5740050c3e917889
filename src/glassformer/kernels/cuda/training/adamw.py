"""A step of AdamW over all tensors of a group as one pass in CUDA C++ (adamw.cu).

torch's fused AdamW also writes the clipped gradient back. The state is that of torch (`step`, `exp_avg`, `exp_avg_sq`),
so checkpoints do not depend on which of them ran.

A weight that matmuls read in bfloat16 (`blocks`) has a copy in it, which the step writes together with the weight: a
captured step casts nothing. Its gradient may be bfloat16, as matmuls write it.
"""

import ctypes
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glassformer.kernels.toolchain import nvrtc

MOST, THREADS, EACH = 64, 256, 8
"""As in adamw.cu: most tensors of a launch, threads of a block, numbers of a thread."""
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
        *((name, ctypes.c_void_p) for name in ("rate", "scale", "failed")),
        *((name, ctypes.c_float) for name in ("decay", "taken1", "beta2", "taken2", "epsilon")),
        *((name, ctypes.c_double) for name in ("log_beta1", "log_beta2")),
    ]


WANTED, COPY = "wants_bfloat16_copy", "bfloat16_copy"
"""Attributes of a parameter: True if matmuls read it in bfloat16; its copy, once an optimizer keeps that up to date."""


def matmul_weight(weight: Tensor) -> Tensor:
    """Return a weight in bfloat16: its copy, where there is one. Steps that are not captured renew the copy."""
    copy: Tensor | None = getattr(weight, COPY, None)
    if copy is None:
        setattr(weight, WANTED, True)
        return weight.to(torch.bfloat16)
    if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        copy.copy_(weight.detach())
        if weight.grad is None and hasattr(weight, "grad_dtype"):  # torch 2.10 and later
            weight.grad_dtype = torch.bfloat16
    return copy


def renew_copies(parameters: list[torch.nn.Parameter]) -> None:
    """Make every copy equal to its weight, after something else than a step has changed weights."""
    for parameter in parameters:
        if hasattr(parameter, COPY):
            getattr(parameter, COPY).copy_(parameter.detach())


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
        for p in updated:
            if getattr(p, WANTED, False) and not hasattr(p, COPY):
                setattr(p, COPY, p.to(torch.bfloat16))
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
    blocks = [-(-p.numel() // (THREADS * EACH)) for p in parameters]
    copies = [getattr(p, COPY, None) for p in parameters]
    gradients = [p.grad for p in parameters if p.grad is not None]
    beta1, beta2 = group["betas"]
    given = Arguments(
        parameter=nvrtc.addresses(parameters, MOST),
        gradient=nvrtc.addresses(gradients, MOST),
        copy=(ctypes.c_void_p * MOST)(*(None if copy is None else copy.data_ptr() for copy in copies)),
        narrow=sum(1 << n for n, gradient in enumerate(gradients) if gradient.dtype is torch.bfloat16),
        mean=nvrtc.addresses([mean for mean, _, _ in states], MOST),
        square=nvrtc.addresses([square for _, square, _ in states], MOST),
        step=nvrtc.addresses([count for *_, count in states], MOST),
        numbers=(ctypes.c_int64 * MOST)(*(p.numel() for p in parameters)),
        first=(ctypes.c_int32 * MOST)(*(sum(blocks[:n]) for n in range(len(blocks)))),
        tensors=len(parameters),
        rate=nvrtc.address(group["lr"]),
        scale=nvrtc.address(shrink),
        failed=nvrtc.address(failed),
        decay=group["weight_decay"],
        taken1=1 - beta1,
        beta2=beta2,
        taken2=1 - beta2,
        epsilon=group["eps"],
        log_beta1=math.log(beta1) if beta1 else -math.inf,
        log_beta2=math.log(beta2) if beta2 else -math.inf,
    )
    text = nvrtc.source(Path(__file__).parent, ("adamw.cu",), {"MOST": MOST})
    nvrtc.kernel(text, "adamw", parameters[0].device.index or 0).launch(given, sum(blocks), THREADS)
