"""Not a contender but the limit: the memory bandwidth of this machine, measured in turns with the contenders."""

import mmap

from glassformer.bench.peers.base import Order

READ = 1 << 30
"""Bytes of one read; far more than any cache holds."""


class Peer:
    """Sum 1 GiB of numbers in huge pages: the fastest of several ways that were tried."""

    version = ""

    def __init__(self, order: Order, size: int = READ):
        import torch

        torch.set_num_threads(order.threads)
        self.size = size
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
