"""Not a contender but the limit: how fast this machine reads memory, in turn with those who read weights from it."""

import mmap

from glassformer.bench.peers.base import Order

READ = 1 << 30
"""Bytes of one reading; far more than any cache holds."""


class Peer:
    """The sum of 1 GiB of numbers in huge pages: of several ways that were tried the one that reads fastest."""

    version = ""

    def __init__(self, order: Order, size: int = READ):
        import torch

        torch.set_num_threads(order.threads)
        self.size = size
        # private: shared memory has pages of its own, small ones
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.numbers = torch.frombuffer(self.memory, dtype=torch.float32).fill_(1.0)

    def read(self) -> int:
        """Read all of it once; returns the bytes."""
        if not float(self.numbers.sum()) > 0:
            raise AssertionError("the memory was not read")
        return self.size
