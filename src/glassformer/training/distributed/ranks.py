"""What torchrun tells a process through its environment, and how ranks speak and leave as one."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator

PATIENCE = 5.0
"""Seconds in which the first process of a machine can say what is wrong before the others leave."""


def is_main() -> bool:
    """Whether this process is the one that prints; known before any group is."""
    return int(os.environ.get("RANK", "0")) == 0


@contextlib.contextmanager
def report_error_once() -> Iterator[None]:
    """An error that all processes of a machine have is printed by the first; all exit with code 2.

    The others leave a little later: torchrun ends all processes as soon as one fails. With or without an error they
    leave at once: threads of a group may outlive Python, whose end then aborts. A process alone just gets the error.
    """
    try:
        yield
        if world_size() > 1:
            leave(0)
    except (ValueError, OSError, ArithmeticError) as error:
        if world_size() == 1 or os.environ.get("GLASSFORMER_DEBUG"):
            raise
        if local_rank() == 0:
            print(f"glass: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            time.sleep(PATIENCE)
        leave(2)


def leave(code: int) -> None:
    """End the process of a rank here and now, its output written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def world_size() -> int:
    """Processes that train together; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))
