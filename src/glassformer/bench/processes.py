"""A contender's process from outside: started, asked, stopped while others have their turn, and always ended."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from glassformer.bench.peers.base import Order

SECONDS = 900.0
"""After which a silent contender is given up; compiling takes minutes, nothing takes this."""
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
COMMAND = [sys.executable, "-P", "-m", "glassformer.bench.worker"]


class Died(Exception):  # noqa: N818 (it is what happened)
    """A contender's process that ended, or said nothing for too long; `str` is its last line."""


class Worker:
    """One process in a session of its own, so that a signal reaches all its threads and children and nobody else."""

    def __init__(self, order: Order):
        self.name, self.order = order.name, order
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True,
            env=environment(order.threads),
        )  # fmt: skip
        self.unread = b""

    def tell(self, line: str) -> None:
        """One line to the process."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Died(self.last_words()) from None

    def hear(self, seconds: float = SECONDS) -> dict[str, Any]:
        """The next answer."""
        assert self.process.stdout is not None
        until, pipe = time.monotonic() + seconds, self.process.stdout.fileno()
        while b"\n" not in self.unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise Died(f"it gave no answer in {seconds:.0f} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise Died(self.last_words())
            self.unread += part
        line, self.unread = self.unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def load(self) -> dict[str, Any]:
        """Hand over the order; returns what the process says when it is loaded and warm."""
        self.tell(self.order.to_json())
        ready: dict[str, Any] = self.hear()["ready"]
        return ready

    def turn(self, number: int) -> dict[str, Any]:
        """One turn: woken, measured, stopped."""
        self.signal(signal.SIGCONT)
        self.tell(json.dumps({"turn": number}))
        answer = self.hear()
        self.signal(signal.SIGSTOP)
        return answer

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        """Whatever state it is in: SIGKILL reaches a stopped process too."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.errors.close()

    def last_words(self) -> str:
        """The last error on standard error, or its last line, or how the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 8192))
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        # some libraries put advice after the error: the error itself is what is asked for
        lines = [line for line in lines if _ERROR.match(line)] or lines
        code = self.process.returncode
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}" + (f" after: {lines[-1]}" if lines else "")
        return lines[-1] if lines else f"it ended with code {code}"


def environment(threads: int) -> dict[str, str]:
    """The environment of a contender: its threads, no network, no helpers that outlive the loading."""
    count = str(threads)
    # without bytecode files every start would compile our sources anew, and only ours
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **own,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def crew() -> Iterator[list[Worker]]:
    """A list for workers that are all ended at the end, an interrupt included."""
    workers: list[Worker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


def ask_once(order: Order) -> dict[str, Any]:
    """Start a process for one order, and return what it says when it is ready."""
    with crew() as workers:
        workers.append(Worker(order))
        return workers[0].load()
