"""Checkpoints that are written by a thread while training goes on (`checkpoint.background`).

The tensors are copied first, so that later steps do not reach the file. At most one checkpoint is being written: the
next one waits for it, and so does the end of the run. An error is raised in the next step, on all ranks.
"""

import threading
from collections.abc import Callable

from glassformer.training.distributed.group import Group, Writer


class Background(Writer):
    """Does work in a thread, one piece after the other."""

    copies = True

    def __init__(self, group: Group):
        super().__init__(group)
        self.aside = group.aside()
        """The same ranks over connections of their own: exchanges of two threads must not mix."""
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def submit(self, work: Callable[[Group], None]) -> None:
        """Wait for the work before, and start this one, which gets the group that it may use."""
        self.settle()

        def run() -> None:
            try:
                work(self.aside)
            except Exception as error:  # raised again in the main thread
                self.error = error

        self.thread = threading.Thread(target=run, name="checkpoint")
        self.thread.start()

    def settle(self) -> None:
        """Wait until nothing is being written; raise the error of what was."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def check(self) -> None:
        """Raise the error of a thread that has failed, on all ranks in the same step."""
        (failed,) = self.group.totals(float(self.error is not None))
        if not failed:
            return
        if self.thread is not None:
            self.thread.join()  # all ranks get the error of one of them
            self.thread = None
        error, self.error = self.error, None
        raise error or RuntimeError("the checkpoint of another rank could not be written")
