"""The processes of a run: what torchrun tells them, how they report errors, and `Group`, which the loop calls.

A single process gets `ALONE`, a `Group` whose methods do nothing. `replicate` and `sharding` have the groups of several
processes. This module imports neither torch nor `torch.distributed`.
"""

import contextlib
import math
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from glassformer.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from glassformer.model import Model
    from glassformer.training.optimizers import Optimizer
    from glassformer.training.run import Run
    from glassformer.weights.tensors import Stored

Function = Callable[..., Any]
T = TypeVar("T")
PATIENCE = 5.0
"""Seconds in which the first process of a machine can report what is wrong before the others leave."""

STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
"""Signals at which a run writes a checkpoint and stops. SLURM sends SIGUSR1 before its time limit if asked to."""


def is_main() -> bool:
    """Whether this process is the one that prints; known before any group is."""
    return int(os.environ.get("RANK", "0")) == 0


class Stopped(KeyboardInterrupt):
    """A signal asked the run to stop, and its checkpoint is written."""

    def __init__(self, number: int):
        super().__init__()
        self.signal = number


class LostRankError(RuntimeError):
    """Another rank ended or does not answer. The message is one sentence."""

    def __init__(self, sentence: str, speaks: bool):
        super().__init__(sentence)
        self.speaks = speaks
        """True on the one rank that prints the sentence."""


@contextlib.contextmanager
def report_error_once() -> Iterator[None]:
    """An error that all processes of a machine have is printed by the first; all exit with code 2.

    The others leave a little later: torchrun ends all processes as soon as one fails. One that is still there then has
    an error of its own, and prints it. With or without an error they leave at once: threads of a group may outlive
    Python, whose end then aborts. A process alone just gets the error.
    """
    try:
        yield
        if world_size() > 1:
            leave(0)
    except Stopped as stopped:
        if world_size() == 1:
            raise
        leave(128 + stopped.signal)
    except LostRankError as lost:
        if lost.speaks:
            print(f"glass: {lost}", file=sys.stderr)
        leave(1)
    except (ValueError, OSError, ArithmeticError) as error:
        if world_size() == 1 or os.environ.get("GLASSFORMER_DEBUG"):
            raise
        sentence = " ".join(str(error).split())
        if local_rank() == 0:
            print(f"glass: {sentence}", file=sys.stderr)
        else:
            time.sleep(PATIENCE)
            print(f"glass: rank {os.environ.get('RANK', '?')} on {socket.gethostname()}: {sentence}", file=sys.stderr)
        leave(2)


def leave(code: int) -> None:
    """End the process of a rank here and now, its output written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def world_size() -> int:
    """Processes that train together; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def restarted() -> bool:
    """Whether torchrun starts these processes again after some of them failed (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def resume_command(out: str) -> str:
    """Return the command that continues a run, for one process or for as many ranks as there are now."""
    words = f"train --resume {shlex.quote(out)}"
    if world_size() == 1:
        return f"glass {words}"
    ranks, hosts = os.environ.get("LOCAL_WORLD_SIZE", str(world_size())), os.environ.get("GROUP_WORLD_SIZE", "1")
    several = "" if hosts == "1" else f" --nnodes {hosts}"
    return f"torchrun{several} --nproc-per-node {ranks} -m glassformer {words}"


class Group:
    """The processes that train together. This base class is a single process, whose methods do nothing."""

    rank = 0
    world = 1
    one_host = True
    parts = 1
    """Ranks that divide each block or each sequence (tensor and context parallelism). They read the same sequences."""
    sharded = False
    """True if tensors are sharded over ranks, so that every rank must take part in every forward pass."""

    @property
    def data_world(self) -> int:
        """Number of ranks that read different sequences."""
        return self.world // self.parts

    @property
    def data_rank(self) -> int:
        """Which of them this is."""
        return self.rank // self.parts

    @property
    def is_main(self) -> bool:
        """True for the process that prints, logs, samples and writes."""
        return self.rank == 0

    def wrap(self, model: "Model", function: Function) -> Function:
        """Distribute the model in place; return a function that computes `function(model, ...)` with gradients."""
        return function

    def adopt(self, optimizer: "Optimizer") -> None:
        """Adapt the optimizer of a wrapped model."""

    def run(self, function: Function, model: "Model", *given: Any) -> Any:
        """Return `function(model, *given)` without gradients."""
        return function(model, *given)

    def accumulating(self, more: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of one accumulated part: while `more` follow, gradients are not reduced over ranks."""
        return contextlib.nullcontext()

    def totals(self, *numbers: float) -> tuple[float, ...]:
        """Return each number summed over the ranks."""
        return numbers

    def gradient_norm(self, model: "Model") -> "Tensor":
        """Return the Euclidean norm of the whole gradient."""
        from glassformer.training.optimizers import gradient_norm

        return gradient_norm([parameter for parameter in model.parameters() if parameter.requires_grad])

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order."""
        return [value]

    def agree(self, value: T) -> T:
        """Return the value of rank 0."""
        return value

    def on_main(self, work: Callable[[], T]) -> T:
        """Call `work` on rank 0 only. All ranks wait and get its result, or its error."""
        return work()

    def require_same(self, run: "Run", data: Any, resumed: dict[str, Any] | None) -> None:
        """Raise ConfigError on all ranks unless they have the same run, code, data and checkpoint (its meta.json)."""

    def watched(self, run: "Run") -> contextlib.AbstractContextManager[Any]:
        """Return the context of a run's steps: if another rank is lost, LostRankError names it."""
        return contextlib.nullcontext()

    def reseed(self, seed: int, step: int) -> None:
        """Seed dropout by rank and step, so that a repeated step draws the same numbers."""

    def local(self, tensor: "Tensor") -> "Tensor":
        """Return this rank's shard of a tensor."""
        return tensor

    def full(self, tensor: "Tensor") -> "Tensor":
        """Return the complete tensor. All ranks must call it."""
        return tensor

    def fill(self, model: "Model", values: "Iterable[tuple[str, Tensor]]") -> None:
        """Give the parameters of a wrapped model on the meta device memory and values. Sharded groups do this."""
        raise NotImplementedError

    def aside(self) -> "Group":
        """Return the same ranks with connections of their own, for a second thread."""
        return self

    def writer(self, run: "Run") -> "Writer":
        """Return what writes the checkpoints of a run: at once, or while training goes on."""
        if not run.checkpoint.background or (self.sharded and not self.one_host):
            return Writer(self)
        from glassformer.training.distributed.background import Background  # not needed by other runs

        return Background(self)

    def hold(self, tensors: "dict[str, Tensor]", copy: bool) -> dict[str, Any]:
        """Return what this rank writes of tensors; with `copy`, as it is now, on the CPU."""
        return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()} if copy else tensors

    def write(self, tensors: dict[str, Any], path: Path) -> None:
        """Write what `hold` returned to a file. All ranks must call it; one that fails raises OSError on all."""
        from glassformer.training.checkpoint import save_tensors

        self.on_main(lambda: save_tensors(tensors, path))

    def read(self, name: str, stored: "Stored", like: "Tensor | None") -> "Tensor":
        """Return the values of a stored tensor, sharded as the parameter `like` is if that has its shape."""
        from glassformer.training.checkpoint import copy_stored

        return copy_stored(stored)

    def whole_model(self, model: "Model") -> "Model | None":
        """Return an unsharded model on rank 0. Other ranks must call it as well and may get none."""
        return model

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[Callable[[], int]]:
        """Yield a function that returns the signal that asked to stop, or 0, so that a step is never cut in two.

        A second signal interrupts immediately. Nothing changes outside the main thread, where signals cannot be caught.
        """
        with caught_signals(repeated=True) as noted:
            yield lambda: noted[0] if noted else 0

    def close(self) -> None:
        """Shut down the process group."""


class Writer:
    """Writes checkpoints at once. `background.Background` does so while training goes on."""

    copies = False
    """True if what is written must be copied first, because the next step changes it."""

    def __init__(self, group: Group):
        self.group = group

    def submit(self, work: Callable[[Group], None]) -> None:
        """Do the work, with a group that it may use."""
        work(self.group)

    def settle(self) -> None:
        """Wait until nothing is being written."""

    def check(self) -> None:
        """Raise the error of work that has failed since the last call."""


ALONE = Group()


@contextlib.contextmanager
def caught_signals(repeated: bool) -> Iterator[list[int]]:
    """Yield a list to which Ctrl-C, SIGTERM and SIGUSR1 are added when they are received, in the main thread.

    With `repeated`, a second signal raises KeyboardInterrupt. Ranks ignore it: a terminal or SLURM sends a signal to
    all processes, and torchrun passes the same one on.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, _frame: Any) -> None:
        if noted and repeated:
            raise KeyboardInterrupt
        noted.append(number)

    known = [getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, note) for number in known}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(run: "Run", world: int | None = None) -> None:
    """Refuse a run that `world` processes cannot share (default: those of torchrun); there may be one only."""
    world = world_size() if world is None else world
    parts, copies = run.loop.accumulate, run.machine.replicate
    kinds = {"replicate": copies, "tensor": run.machine.tensor, "context": run.machine.context}
    chosen = {f"machine.{name}={number}": number for name, number in kinds.items() if number > 1}
    if world > 1 and world % math.prod(chosen.values()):
        raise ConfigError(
            f"{' x '.join(chosen)} does not divide {world} ranks: all parts need the same number of ranks."
        )
    if world > 1 and run.machine.tensor > 1:
        from glassformer.training.distributed.tensor import check_tensor

        check_tensor(run)
        world //= run.machine.tensor
    if world > 1 and run.machine.context > 1:
        from glassformer.training.distributed.context import check_context

        check_context(run)
        world //= run.machine.context
    share = world * parts
    if run.loop.batch % share:
        near = max(run.loop.batch // share, 1) * share
        by = f"{world} ranks" if parts == 1 else f"{world} ranks x loop.accumulate={parts}"
        raise ConfigError(
            f"loop.batch={run.loop.batch} is not a multiple of {by}: they cannot take equal shares. "
            f"Use {near} or {near + share}."
        )


def start(run: "Run") -> Group:
    """Return the group of this process: from the environment of torchrun, or ALONE. It can be called again."""
    if world_size() == 1:
        return ALONE
    check(run)
    from glassformer.training.distributed.start import connect

    return connect(run)
