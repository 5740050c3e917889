"""What the commands of this folder share: the check that there is a GPU, and times that include its work."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from glassformer.bench.commands import seconds_of


def require_gpu() -> None:
    """Exit with code 2 and one sentence if this machine has no CUDA device."""
    if not torch.cuda.is_available():
        print(
            "this benchmark needs a CUDA device, and torch finds none: run it on a machine with a GPU.", file=sys.stderr
        )
        sys.exit(2)


def gpu_seconds(work: Callable[[], Any]) -> float:
    """Return the seconds of one call, including the GPU's work."""

    def finished() -> None:
        work()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    return seconds_of(finished)
