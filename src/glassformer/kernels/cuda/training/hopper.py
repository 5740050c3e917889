"""Whether kernels that are written for Hopper GPUs (hopper.cuh, what they are made of) can run here."""

from functools import cache

import torch

from glassformer.kernels.cuda.training.fused_loss_cuda import can_compile


@torch.compiler.assume_constant_result
def available() -> bool:
    """Whether there is a GPU that they are for, and a compiler."""
    return _available()


@cache
def _available() -> bool:
    is_there = torch.cuda.is_available() and torch.version.cuda is not None
    return is_there and torch.cuda.get_device_capability() == (9, 0) and can_compile()


@torch.compiler.assume_constant_result
def blocks() -> int:
    """As many as run at once, if each needs most of a multiprocessor."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
