"""Work in threads: a bounded queue, a deadline for each job, and an end when the client leaves.

A job runs in one of a few worker threads. When its ticket is cancelled (client gone, deadline passed, server stopping)
a `Cancelled` is raised inside the running thread at its next Python instruction, so that no job has to ask; a single
call into native code is finished first, and so is an import, or a module that says `LET_FINISH = True` because it opens
files and starts processes: between opening and `with` an exception would leave them open. When all workers are taken
and the queue is full, `BusyError` is raised at once: the answer is 429 with Retry-After.
"""

import asyncio
import contextlib
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from glassformer.studio.errors import BusyError, TooLongError

T = TypeVar("T")
PATIENCE = 0.02
"""Seconds between two looks at a job that is to end and is let finish something."""
LOST = 3.0
"""Seconds after which an exception that was raised in a job and has not ended it counts as lost."""


class Cancelled(BaseException):
    """Raised inside a job that nobody waits for any longer. Not an Exception: `except Exception` must not stop it."""


class Ticket:
    """One job's right to go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._again: threading.Timer | None = None
        self.cancelled = False

    def check(self) -> None:
        """Raises Cancelled when nobody waits any longer."""
        if self.cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """End the job: at once if it waits, at its next Python instruction if it runs, after what is let finish."""
        with self._lock:
            if not self.cancelled:  # once: a second exception could hit the thread's next job
                self.cancelled = True
                self._interrupt()

    def _interrupt(self) -> None:
        """With the lock held. A module whose import is broken off stays half-imported for the whole process."""
        if self._thread is None:
            return
        patient = _lets_finish(self._thread)
        if not patient:
            _raise_in(self._thread, Cancelled)
        # raised inside a finaliser or a callback of the garbage collector it is lost: a job that goes on is asked again
        self._again = threading.Timer(PATIENCE if patient else LOST, self._try_again)
        self._again.daemon = True
        self._again.start()

    def _try_again(self) -> None:
        with self._lock:
            self._interrupt()

    def run(self, function: Callable[[], T]) -> T:
        """Call the function in this thread, open to `cancel` only meanwhile."""
        with self._lock:
            self.check()
            self._thread = threading.get_ident()
        try:
            return function()
        finally:
            self._close()

    def _close(self) -> None:
        """From here on nothing is raised; what was raised and has not arrived yet is taken back."""
        while True:
            try:
                with self._lock:
                    self._thread = None
                    if self._again is not None:
                        self._again.cancel()
                    _raise_in(threading.get_ident(), None)
                return
            except Cancelled:  # it arrived in here: the lock is free again, close once more
                continue


def _lets_finish(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib") or frame.f_globals.get("LET_FINISH"):
            return True
        frame = frame.f_back
    return False


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    target = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)


class Jobs:
    """A few worker threads with a bounded queue before them."""

    def __init__(self, name: str, workers: int, waiting: int):
        self.name, self.workers, self.waiting = name, workers, waiting
        self._queue: deque[tuple[Ticket, Callable[[], None]]] = deque()
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._active: set[Ticket] = set()
        self._stopped = False

    @property
    def load(self) -> int:
        """Jobs that run or wait."""
        return len(self._active) + len(self._queue)

    def submit(self, ticket: Ticket, function: Callable[[], None]) -> None:
        """Queue a job. Raises BusyError when there is no room."""
        with self._change:
            if self._stopped or len(self._active) + len(self._queue) >= self.workers + self.waiting:
                raise BusyError("the studio is busy: ask again in a moment.")
            if len(self._threads) < self.workers:
                thread = threading.Thread(target=self._work, name=f"{self.name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._queue.append((ticket, function))
            self._change.notify()

    def drop(self, ticket: Ticket) -> None:
        """Cancel a job, and take it out of the queue if it still waits."""
        ticket.cancel()
        with self._change:
            self._queue = deque(item for item in self._queue if item[0] is not ticket)

    def stop(self) -> None:
        """Cancel everything; the threads end."""
        with self._change:
            self._stopped = True
            active = [*self._active, *(ticket for ticket, _ in self._queue)]
            self._queue.clear()
            self._change.notify_all()
        for ticket in active:
            ticket.cancel()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._queue and not self._stopped:
                    self._change.wait()
                if self._stopped:
                    return
                ticket, function = self._queue.popleft()
                self._active.add(ticket)
            try:
                ticket.run(function)
            except Cancelled:
                pass
            finally:
                with self._change:
                    self._active.discard(ticket)

    async def run(self, function: Callable[[Ticket], T], seconds: float) -> T:
        """The function's result. Cancelling this coroutine cancels the job; after `seconds` it raises TooLongError."""
        loop, ticket = asyncio.get_running_loop(), Ticket()
        future: asyncio.Future[T] = loop.create_future()

        def give(result: Any, error: BaseException | None) -> None:
            if not future.done():
                future.set_result(result) if error is None else future.set_exception(error)

        def job() -> None:
            try:
                result, error = function(ticket), None
            except Exception as raised:
                result, error = None, raised
            tell(loop, give, result, error)

        self.submit(ticket, job)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled() and future.exception() is not None:
                raise  # the job's own
            raise TooLongError(f"this took longer than {seconds:g} s and was stopped: ask for less.") from None
        finally:
            self.drop(ticket)


def tell(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """From a worker to the loop; a loop that is closed has nobody left to tell."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
