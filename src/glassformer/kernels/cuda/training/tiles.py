"""Products of matrices on Hopper GPUs whose tiles are finished by those who made them (tiles.cuh): their kernels."""

import ctypes
from functools import cache

from torch import Tensor

from glassformer.kernels.cuda.training.fused_loss_cuda import with_macros
from glassformer.kernels.toolchain import nvrtc

TILE, THREADS = 128, 384
STAGES, CLUSTER, PANEL = 5, 2, 24
"""Steps of 64 along the depth that are on their way at once; blocks that share a factor; tiles side by side."""
RING = STAGES * 2 * TILE * 128
"""Bytes of these steps."""
BOARD = TILE * 2 * TILE
"""Bytes of a tile of results."""


@cache
def source(file: str, depth: int, **macros: int) -> str:
    """The text of a kernel of such a product."""
    sizes = {"STAGES": STAGES, "CLUSTER": CLUSTER, "PANEL": PANEL, "DEPTH": depth}
    return with_macros(sizes | macros, "floats.cuh", "hopper.cuh", "tiles.cuh", file)


def factors(left: Tensor, right: Tensor) -> dict[str, tuple[Tensor, int]]:
    """What the copy engine copies of them, and the rows it takes at a time."""
    return {"left": (left, TILE), "right": (right, TILE // CLUSTER)}


def launch(text: str, name: str, given: ctypes.Structure, device: int, boards: int) -> None:
    """`boards`: of memory for results, beside the ring."""
    shared = RING + boards * BOARD
    kernel = nvrtc.kernel(text, name, device, shared)
    kernel.launch(given, CLUSTER * _clusters(text, name, device, shared), THREADS, cluster=CLUSTER)


@cache
def _clusters(text: str, name: str, device: int, shared: int) -> int:
    """As many as run at once."""
    return nvrtc.kernel(text, name, device, shared).most_clusters(CLUSTER, THREADS)
