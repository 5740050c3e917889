"""Control a process: start it, send it requests, stop it while others run, and always end it."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from glassformer.bench.peers.base import Order

SECONDS = 900.0
"""Time limit for an answer. Compiling takes minutes; nothing takes this long."""
_ERROR = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
COMMAND = [sys.executable, "-P", "-m", "glassformer.bench.worker"]


class Died(Exception):  # noqa: N818 (the name describes the event)
    """A contender's process ended, or did not answer in time; `str` is its last line of output."""


class Process:
    """One process in its own session, so that a signal reaches its threads and children and no other process."""

    def __init__(self, command: Sequence[str], variables: dict[str, str], folder: Path | None = None):
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self.began = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True,
            env=variables, cwd=folder,
        )  # fmt: skip
        self.unread = b""

    def send(self, line: str) -> None:
        """Send one line to the process."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Died(self.last_error()) from None

    def read_line(self, seconds: float) -> bytes:
        """Return the next line that the process prints. Raise Died if it ends before, or takes longer."""
        assert self.process.stdout is not None
        until, pipe = time.monotonic() + seconds, self.process.stdout.fileno()
        while b"\n" not in self.unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise Died(f"it gave no answer in {seconds:.0f} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise Died(self.last_error())
            self.unread += part
        line, self.unread = self.unread.split(b"\n", 1)
        return line

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Kill the process, also if it is stopped."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.errors.close()

    def last_error(self) -> str:
        """Return the last error on standard error, or the last line, or the exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 8192))
        lines = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
        # some libraries print advice after the error; return the error itself
        lines = [line for line in lines if _ERROR.match(line)] or lines
        code = self.process.returncode
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}" + (f" after: {lines[-1]}" if lines else "")
        return lines[-1] if lines else f"it ended with code {code}"


class Worker(Process):
    """The process of a contender."""

    def __init__(self, order: Order, caches: Path | None = None):
        self.name, self.order = order.name, order
        super().__init__(COMMAND, environment(order.threads, order.device, caches))

    def receive(self, seconds: float = SECONDS) -> dict[str, Any]:
        """Return the next answer of the process."""
        answer: dict[str, Any] = json.loads(self.read_line(seconds))
        return answer

    def load(self) -> dict[str, Any]:
        """Send the order, and return the answer of the process when it is loaded and warm."""
        self.send(self.order.to_json())
        ready: dict[str, Any] = self.receive()["ready"]
        return ready

    def turn(self, number: int) -> dict[str, Any]:
        """Run one turn: resume the process, measure, stop it."""
        self.signal(signal.SIGCONT)
        self.send(json.dumps({"turn": number}))
        answer = self.receive()
        self.signal(signal.SIGSTOP)
        return answer


def environment(threads: int, device: str = "cpu", caches: Path | None = None) -> dict[str, str]:
    """Return the environment of a contender: its number of threads, no network, no background compilers.

    On a GPU, whose kernels take minutes to compile in one thread, compilers keep their threads. `caches` is the folder
    of everything that is compiled or downloaded; default: the user's.
    """
    count = str(threads)
    # without bytecode files every start would compile our sources again, and only ours
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    folders = () if caches is None else ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "GLASSFORMER_CACHE")
    return {
        **own,
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count),
        **({"TORCHINDUCTOR_COMPILE_THREADS": "1"} if device == "cpu" else {}),
        **{name: f"{caches}/{name.lower()}" for name in folders},
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.contextmanager
def ending_workers() -> Iterator[list[Worker]]:
    """Yield a list; all workers that are added to it are ended on exit, also after an interrupt."""
    workers: list[Worker] = []
    try:
        yield workers
    finally:
        for worker in workers:
            worker.close()


def ask_once(order: Order) -> dict[str, Any]:
    """Start a process for one order, and return its answer when it is ready."""
    with ending_workers() as workers:
        workers.append(Worker(order))
        return workers[0].load()
