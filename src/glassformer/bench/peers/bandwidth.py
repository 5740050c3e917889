"""Not a contender but the limit: the memory bandwidth of this machine, measured in turns with the contenders.

With `--device cuda` it is the bandwidth of the GPU's memory.
"""

import mmap

from glassformer.bench.peers.base import Order

READ = 1 << 30
"""Bytes of one read; far more than any cache holds."""
READ_ON_GPU = 8 << 30
"""There, 1 GiB takes a quarter of a millisecond, and launching the sum would count."""


class Peer:
    """Sum 1 GiB of numbers in huge pages: the fastest of several ways that were tried."""

    version = ""

    def __init__(self, order: Order, size: int = 0):
        import torch

        torch.set_num_threads(order.threads)
        self.size = size or (READ if order.device == "cpu" else READ_ON_GPU)
        size = self.size
        if order.device != "cpu":
            self.numbers = torch.ones(size // 4, device=order.device)
            return
        # private, because shared memory has small pages
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.numbers = torch.frombuffer(self.memory, dtype=torch.float32).fill_(1.0)

    def read(self) -> int:
        """Read the buffer once and return its size in bytes."""
        if not float(self.numbers.sum()) > 0:
            raise AssertionError("the memory was not read")
        return self.size
