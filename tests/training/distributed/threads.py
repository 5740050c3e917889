"""Ranks that are threads of this process, for tests of exchanges that need no launch."""

import contextlib
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


class Turns(Meeting):
    """Threads that run one at a time, each with random numbers of its own, as processes have."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.turn = threading.Lock()

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        numbers = torch.get_rng_state()
        self.turn.release()
        try:
            return super().exchange(rank, x)
        finally:
            self.turn.acquire()
            torch.set_rng_state(numbers)


class Threads(Ranks):
    """A rank whose `group` is a Meeting."""

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        stacked = torch.stack(self.group.exchange(self.rank, x))
        return x.copy_(stacked.amax(0) if largest else stacked.sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.group.exchange(self.rank, x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack(self.group.exchange(self.rank, x)).sum(0)[self.rank]


def on_ranks(size: int, work: Callable[[Threads], T], seed: int | None = None) -> list[T]:
    """Return what `work` returns on each of `size` ranks; raise the error of the first that has one.

    With a `seed` they take turns, and all begin with the same random numbers.
    """
    meeting = Meeting(size) if seed is None else Turns(size)
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with meeting.turn if isinstance(meeting, Turns) else contextlib.nullcontext():
                if seed is not None:
                    torch.manual_seed(seed)
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
