"""Ranks that are threads of this process, for tests of exchanges that need no launch."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from glassformer.training.distributed.exchange import Ranks

T = TypeVar("T")
SECONDS = 30.0


@dataclass
class Meeting:
    """Where threads exchange tensors."""

    size: int
    barrier: threading.Barrier = field(init=False)
    given: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier, self.given = threading.Barrier(self.size, timeout=SECONDS), [None] * self.size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x.detach().clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class Threads(Ranks):
    """A rank whose `group` is a Meeting."""

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        stacked = torch.stack(self.group.exchange(self.rank, x))
        return x.copy_(stacked.amax(0) if largest else stacked.sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.group.exchange(self.rank, x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack(self.group.exchange(self.rank, x)).sum(0)[self.rank]


def on_ranks(size: int, work: Callable[[Threads], T]) -> list[T]:
    """Return what `work` returns on each of `size` ranks; raise the error of the first that has one."""
    meeting = Meeting(size)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(Threads(meeting, rank, size))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return found
