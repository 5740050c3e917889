"""Handle Ctrl-C between two steps, not inside one."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interrupts(active: bool = True) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM was received. A second signal interrupts immediately.

    Nothing changes if not `active`, or outside the main thread, where signals cannot be caught. With several ranks, a
    rank that saw the signal one step later than the others would wait for them forever.
    """
    noted: list[int] = []
    if not active or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number: int, _frame: Any) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(noted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
