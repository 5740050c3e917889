"""Ctrl-C between two steps, not inside one."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def interrupts(active: bool = True) -> Iterator[Callable[[], bool]]:
    """Inside the block the first Ctrl-C or SIGTERM is only noted: ask by calling what is yielded. A second one stops.

    Not `active`, or elsewhere than in the main thread (where signals cannot be caught), nothing changes: of several
    ranks, one that noted a signal later than the others would wait for them for ever.
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
