"""Jobs in worker threads: a bounded queue, a time limit, and cooperative cancellation.

A job runs in one of anyio's worker threads, at most `workers` of a pool at a time. It is cancelled through the cancel
scope of the task that waits for it: because the client disconnected, the time limit passed, or the server shuts down.
A running thread is never interrupted. It calls `check_cancelled`, which raises the cancellation exception of anyio (a
BaseException, so that `except Exception` does not catch it) once the job is cancelled. Two kinds of code do so:

* `emit` of events.py and the loop over generated tokens, explicitly;
* everything else that computes with torch, through `CheckTorchCalls`: each call of a torch function is a check.

The waiting task returns when its job has ended, so the pool never runs more threads than it has workers. When all
workers are occupied and the queue is full, `BusyError` is raised at once (429 with Retry-After).
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread

from glassformer.studio.errors import BusyError, TimeLimitError

T = TypeVar("T")


def check_cancelled() -> None:
    """Raise the cancellation exception if the job of this thread is cancelled. Outside a job, do nothing."""
    with contextlib.suppress(RuntimeError):  # this thread is not one of anyio's worker threads
        anyio.from_thread.check_cancelled()


def with_torch_checks(function: Callable[[], T]) -> T:
    """Call a function, checking for cancellation at each call of a torch function. Without torch, just call it."""
    if "torch" not in sys.modules:
        return function()
    from torch.overrides import TorchFunctionMode

    class CheckTorchCalls(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            check_cancelled()
            return func(*args, **(kwargs or {}))

    with CheckTorchCalls():
        return function()


class WorkerPool:
    """At most `workers` jobs at a time, and at most `waiting` more in the queue. Used from one event loop only."""

    def __init__(self, workers: int, waiting: int):
        self.capacity = workers + waiting
        self.load = 0
        """Jobs that are running or waiting."""
        self._limiter = anyio.CapacityLimiter(workers)
        self._scopes: set[anyio.CancelScope] = set()
        self._closed = False

    def reserve(self) -> None:
        """Reserve a slot for one job; `release` frees it. Raises BusyError if the queue is full."""
        if self._closed or self.load >= self.capacity:
            raise BusyError("the studio is busy: try again in a moment.")
        self.load += 1

    def release(self) -> None:
        self.load -= 1

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        self.reserve()
        try:
            yield
        finally:
            self.release()

    async def run(self, function: Callable[[], T], seconds: float) -> T:
        """Return the function's result. Raises BusyError, or TimeLimitError after `seconds`."""
        with self.reserved():
            return await self.run_reserved(function, seconds)

    async def run_reserved(self, function: Callable[[], T], seconds: float) -> T:
        """Like `run`, for a caller that has reserved a slot."""
        with anyio.move_on_after(seconds) as scope:
            self._scopes.add(scope)
            try:
                return await anyio.to_thread.run_sync(function, limiter=self._limiter)
            except anyio.get_cancelled_exc_class():
                scope.cancel()  # a task cancelled by asyncio itself has no cancelled scope: let the thread see it
                raise
            finally:
                self._scopes.discard(scope)
        if self._closed:
            raise BusyError("the studio is shutting down: start it again.")
        raise TimeLimitError(f"this took longer than {seconds:g} s and was stopped: request less.")

    def close(self) -> None:
        """Cancel all jobs and refuse new ones."""
        self._closed = True
        for scope in list(self._scopes):
            scope.cancel()
