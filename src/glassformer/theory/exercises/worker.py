"""A process that imports NumPy (and torch) once and runs submissions, one after the other, each in a limited child."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from glassformer.theory.exercises.exercise import ExerciseError

RUNNER = Path(__file__).with_name("runner.py")
MOST = 64 << 20
"""Number of bytes of events that are kept; a submission that writes more has flooded the channel."""
GRACE = 120
"""Seconds that the process has beyond the limit of a submission, to start and to report."""


class Ended(NamedTuple):
    """How a child ended, and what it wrote."""

    output: bytes
    code: int
    late: bool


class Worker:
    """A process that runs one submission at a time. Use it in a `with` statement, from one thread at a time."""

    def __init__(self, modules: Sequence[str] = ()):
        self.modules = tuple(modules)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = self._events = self._status = -1

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, job: dict[str, Any], seconds: float) -> Ended:
        """Run one job. `seconds` limits its wall-clock time."""
        self._start()
        limit, data = str(seconds).encode(), json.dumps(job).encode()
        message = b"%d %s%d %s" % (len(limit), limit, len(data), data)
        try:
            while message:
                message = message[os.write(self._jobs, message) :]
            return self._read(time.monotonic() + seconds + GRACE)
        except BrokenPipeError:
            return self._ended(b"", late=False)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        if os.name != "posix":
            raise ExerciseError("grading needs Linux or macOS: on Windows, use the Windows Subsystem for Linux.")
        one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
        self._folder = tempfile.TemporaryDirectory(prefix="glass-exercise-")
        theirs_jobs, self._jobs = os.pipe()
        self._events, theirs_events = os.pipe()
        self._status, theirs_status = os.pipe()
        theirs = (theirs_jobs, theirs_events, theirs_status)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(RUNNER), *map(str, theirs), *self.modules],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=theirs,
            cwd=self._folder.name,
            env={**kept, **one_thread, "TORCHINDUCTOR_CACHE_DIR": self._folder.name},
            start_new_session=True,
        )
        for descriptor in theirs:
            os.close(descriptor)

    def _read(self, deadline: float) -> Ended:
        """Read events until the process reports the end of the child."""
        output, reported = b"", b""
        while not reported.endswith(b"\n"):
            ready, _, _ = select.select([self._events, self._status], [], [], max(deadline - time.monotonic(), 0))
            if self._events in ready:
                piece = os.read(self._events, 1 << 16)
                output += piece if len(output) < MOST else b""
            if self._status in ready:  # all events were written before this
                reported += (piece := os.read(self._status, 1 << 12))
            if not ready or not piece:  # too late even for the process, or it has ended
                return self._ended(output, late=not ready)
        while select.select([self._events], [], [], 0)[0] and (piece := os.read(self._events, 1 << 16)):
            output += piece if len(output) < MOST else b""
        return Ended(output, **json.loads(reported))

    def _ended(self, output: bytes, late: bool) -> Ended:
        """Return the end of a job whose process was killed; raise ExerciseError if the process ended by itself."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if late else 5)
        code = self._process.poll()
        self.close()
        if code is not None and code > 0:
            needed = ", ".join(("numpy", *self.modules))
            raise ExerciseError(f"the process that runs submissions cannot start: does `python -I` import {needed}?")
        return Ended(output, -signal.SIGKILL, late)

    def close(self) -> None:
        """End the process and everything that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for descriptor in (self._jobs, self._events, self._status):
                os.close(descriptor)
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None
