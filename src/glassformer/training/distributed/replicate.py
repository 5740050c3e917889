"""DDP: every rank holds the whole model, and gradients are averaged while the backward pass runs."""

import contextlib
import copy
import gc
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from glassformer.config import ConfigError
from glassformer.model import Model
from glassformer.model.moe import MoE
from glassformer.training.distributed import failure, start
from glassformer.training.distributed.group import STOP_SIGNALS, Function, Group, T, caught_signals
from glassformer.training.distributed.muon import Owners
from glassformer.training.muon import Muon
from glassformer.training.optimizers import Optimizer
from glassformer.training.run import Machine, Run

STOPS = tuple(int(getattr(signal, name)) for name in STOP_SIGNALS if hasattr(signal, name))


class Root(nn.Module):
    """A module whose forward calls any function of the model, because DDP and FSDP wrap the forward of a module."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, function: Function, *given: Any) -> Any:
        return function(self.model, *given)


class Replicated(Group):
    """DDP: the same weights on every rank."""

    ddp: nn.parallel.DistributedDataParallel

    def __init__(self, device: torch.device, joined: start.Joined, machine: Machine):
        import torch.distributed as dist

        self.dist, self.joined, self.machine = dist, joined, machine
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.parts = machine.tensor * machine.context
        self.owners: Any = None
        """The ranks among which each matrix of Muon has one owner. None: all."""
        self.one_host = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        self.noted: list[int] = []
        """Signals that this rank has received."""
        self.stop_signal = 0
        """The signal at which all ranks stop after this step; 0 if there is none."""

    def wrap(self, model: Model, function: Function) -> Function:
        # the loss does not use a pooler, and the tokens of a rank may leave an expert out
        idle = getattr(model.config, "pooler", False) or any(isinstance(m, MoE) for m in model.modules())
        ddp = nn.parallel.DistributedDataParallel(
            Root(model), gradient_as_bucket_view=True, find_unused_parameters=idle
        )
        self.ddp = ddp
        return lambda model, *given: ddp(function, *given)

    def adopt(self, optimizer: Optimizer) -> None:
        for member, _ in optimizer.members:
            if isinstance(member, Muon):  # AdamW works element by element
                Owners(member, self)

    def accumulating(self, more: bool) -> contextlib.AbstractContextManager[Any]:
        return self.ddp.no_sync() if more else contextlib.nullcontext()

    def totals(self, *numbers: float) -> tuple[float, ...]:
        """Also agree on whether a signal asks to stop: every rank sees it after the same exchange.

        The numbers are on the CPU, and gloo sums them: unlike NCCL, it reports a lost rank as an error.
        """
        self.joined.watch.exchanges += 1
        asked = [float(number in self.noted) for number in STOPS]
        sums = torch.tensor((*numbers, *asked), dtype=torch.float64)
        self.dist.all_reduce(sums)
        found = sums.tolist()
        self.stop_signal = next((n for n, ranks in zip(STOPS, found[len(numbers) :], strict=True) if ranks), 0)
        # ranks that read the same sequences count once
        return tuple(number / self.parts for number in found[: len(numbers)])

    def whole_tensor(self, name: str, tensor: Tensor) -> Tensor:
        """Return the complete tensor of this name, or of this state of a parameter. All ranks must call it."""
        return self.full(tensor)

    def gather(self, value: T) -> list[T]:
        self.joined.watch.exchanges += 1
        values: list[Any] = [None] * self.world
        self.dist.all_gather_object(values, value, group=self.joined.patient)
        return values

    def agree(self, value: T) -> T:
        self.joined.watch.exchanges += 1
        values = [value]
        self.dist.broadcast_object_list(values, src=0, group=self.joined.patient)
        return values[0]

    def on_main(self, work: Callable[[], T]) -> T:
        result: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except Exception as raised:
                error = raised
        done, failed = self.agree((result, error))
        if failed is not None:
            raise error or failed  # the error of rank 0 itself has its traceback
        return cast(T, done)

    def reseed(self, seed: int, step: int) -> None:
        digest = hashlib.sha256(f"{seed} {step} {self.rank // self.machine.tensor}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little"))

    def aside(self) -> "Replicated":
        other = copy.copy(self)
        other.joined = start.connect_again(self.joined)
        return other

    def hold(self, tensors: dict[str, Any], copy: bool) -> dict[str, Any]:
        return super().hold(tensors, copy) if self.is_main else {}

    def require_same(self, run: Run, data: Any, resumed: dict[str, Any] | None) -> None:
        problem = start.difference(self.gather(start.identity(run, data, resumed)))
        if problem is not None:
            raise ConfigError(problem)

    @contextlib.contextmanager
    def watched(self, run: Run) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not failure.is_lost_connection(error):
                raise
            raise failure.explain(error, self.joined.watch, run.out, self.joined.timeout) from error

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the signal that any rank received: `totals` tells all ranks at once."""
        with caught_signals(repeated=False) as self.noted:
            yield lambda: self.stop_signal

    def close(self) -> None:
        self.totals(0)  # no rank leaves while another still communicates
        for name in ("ddp", "root"):
            self.__dict__.pop(name, None)
        gc.collect()  # references to the group keep its threads alive, and those may outlive Python
        start.disconnect()
