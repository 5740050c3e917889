"""Whether kernels written for Hopper GPUs (on the primitives of hopper.cuh) can run on this machine."""

from functools import cache

import torch

from glassformer.kernels.cuda.training.loss import can_compile


@torch.compiler.assume_constant_result
def available() -> bool:
    """Return whether there is a Hopper GPU and NVRTC: the answer is a constant for torch.compile."""
    return _available()


@cache
def _available() -> bool:
    is_there = torch.cuda.is_available() and torch.version.cuda is not None
    return is_there and torch.cuda.get_device_capability() == (9, 0) and can_compile()


@torch.compiler.assume_constant_result
def blocks() -> int:
    """Return how many blocks run at once if each needs most of a multiprocessor."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
