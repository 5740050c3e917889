"""Training: from a text file to a trained model, reproducible and crash-safe.

Names are imported when first used: reading a run file or computing the size of a model does not import torch.

What makes the start of a run shorter is here as well. Importing torch and its compiler and compiling the first step
make a million objects that stay. Python's garbage collector would look at them again and again, for 0.9 s in all.
"""

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from glassformer import imported_when_used

_HOMES = {
    "Run": "run",
    "Session": "session",
    "TrainResult": "api",
    "TrainState": "loop",
    "baselines": "data.ngram",
    "open_session": "session",
    "read_run": "run",
    "resume_session": "session",
    "train": "loop",
    "train_step": "loop",
}

__all__ = [
    "Run",
    "Session",
    "TrainResult",
    "TrainState",
    "baselines",
    "open_session",
    "read_run",
    "resume_session",
    "train",
    "train_step",
]

if TYPE_CHECKING:
    from glassformer.training.api import TrainResult
    from glassformer.training.data.ngram import baselines
    from glassformer.training.loop import TrainState, train, train_step
    from glassformer.training.run import Run, read_run
    from glassformer.training.session import Session, open_session, resume_session


def __getattr__(name: str) -> Any:
    with postponed_collection():
        return imported_when_used(__name__, _HOMES)(name)


@contextlib.contextmanager
def postponed_collection() -> Iterator[None]:
    """Switch the garbage collector off. All objects are old afterwards: only a full collection looks at them.

    Nothing is kept alive by that. In a process that has frozen objects itself, generations stay as they are.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if enabled:
            gc.enable()


P = ParamSpec("P")
R = TypeVar("R")


def first_postponed(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose first call, which compiles, runs with the garbage collector off."""
    first = iter([postponed_collection()])

    def call(*given: P.args, **named: P.kwargs) -> R:
        with next(first, contextlib.nullcontext()):
            return function(*given, **named)

    return call


COMPILER = "torch._inductor.compile_fx"
"""The module that imports all of torch's compiler."""


@contextlib.contextmanager
def importing_compiler() -> Iterator[None]:
    """Import torch's compiler, a second or two, while the block runs. The block itself must not import parts of it.

    At the end of the block the import has ended, and its error is raised if it failed.
    """
    with postponed_collection(), ThreadPoolExecutor(1) as background:
        importing = background.submit(importlib.import_module, COMPILER)
        yield
    importing.result()
