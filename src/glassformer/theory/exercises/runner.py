"""Run submissions, each in a process of its own. Run by path, never imported by the package: none of our code is here.

`python runner.py JOBS EVENTS STATUS [MODULE ...]` imports NumPy and the named modules once. Then it forks a child for
each job, which takes milliseconds. The three numbers are file descriptors:

* JOBS: a line with the limit of seconds, which this process reads, and a line of JSON, which only the child reads: the
  child sees no other submission, not even in freed memory;
* EVENTS: JSON lines of the child, one before and one after each call, so that the reader knows which call was running
  when the child ended;
* STATUS: a JSON line of this process when the child has ended.

Nothing is graded here: the solution is not in this process.
"""

import contextlib
import importlib.util
import io
import json
import os
import signal
import sys
import time
import traceback
import types
import warnings
from typing import Any

import numpy as np

SHOWN = 2000
"""Number of characters of the student's output that are kept."""
FILE = "submission.py"
"""The name of the student's file in tracebacks. There is no such file: the source comes with the job."""


def _load_sandbox() -> Any:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox.py")
    spec = importlib.util.spec_from_file_location("sandbox", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TruncatedOutput(io.TextIOBase):
    """Standard output of the student's code: the beginning is kept, the rest is dropped."""

    def __init__(self) -> None:
        self.text = ""

    def writable(self) -> bool:
        return True

    def write(self, words: str) -> int:
        self.text += words[: max(SHOWN - len(self.text), 0)]
        return len(words)


def encode(value: Any, depth: int = 0) -> Any:
    """Encode a returned value as JSON; a value that cannot be encoded is replaced by its type's name."""
    if isinstance(value, np.generic):
        value = value.item() if value.dtype.kind in "fiub" else value
    if isinstance(value, bool | int | float | str) or value is None:
        return value if not isinstance(value, int) or abs(value) < 10**300 else {"type": "int too large"}
    if type(value).__module__.split(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiub" or value.size > 1_000_000:
            return {"type": f"array of {value.dtype} with {value.size} entries"}
        return {"array": value.tolist(), "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, list | tuple) and depth < 8 and len(value) <= 100_000:
        return {"list" if isinstance(value, list) else "tuple": [encode(item, depth + 1) for item in value]}
    return {"type": type(value).__name__}


def decode(value: Any) -> Any:
    """Decode an argument from JSON."""
    if isinstance(value, dict):
        if "dict" in value:
            return {name: decode(item) for name, item in value["dict"].items()}
        return np.array(value["array"], dtype=value["dtype"]).reshape(value["shape"])
    return [decode(item) for item in value] if isinstance(value, list) else value


def failure(error: BaseException) -> dict[str, Any]:
    """Encode an exception as JSON, with the line number in the student's file."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [number for frame, number in frames if frame.f_code.co_filename == FILE]
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    try:
        words = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    except BaseException:  # an exception of the student's code may fail to describe itself
        words = ""
    return {"error": type(error).__name__, "message": str(words)[:300], "line": line}


def call(function: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Call the function once with fresh arguments. Return its value or its error, and which arguments it modified."""
    arguments = {name: decode(value) for name, value in case.items()}
    try:
        value = encode(function(*arguments.values()))
    except BaseException as error:
        return {**failure(error), "changed": []}
    kept = {name: decode(value) for name, value in case.items()}
    changed = [name for name in kept if not _same(kept[name], arguments[name])]
    return {"value": value, "changed": changed}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def load(source: str, function: str) -> Any:
    """Run the student's file. Return the function, if there is one, and the names of all functions."""
    module = types.ModuleType("submission")
    module.__file__ = FILE
    sys.modules["submission"] = module  # dataclasses, for example, look up their module
    exec(compile(source, FILE, "exec"), module.__dict__)
    names = sorted(name for name, value in module.__dict__.items() if callable(value) and name[0] != "_")
    return module.__dict__.get(function), names


def run(job: dict[str, Any], events: int, layers: list[str]) -> None:
    """Load the submission and call its function on every case; write an event before and after each step."""
    printed = TruncatedOutput()
    sys.stdout = sys.stderr = printed
    warnings.simplefilter("ignore")  # an overflow is visible in the answer and explained there
    getpid, write, owner = os.getpid, os.write, os.getpid()

    def report(**facts: Any) -> None:
        if getpid() != owner:  # a fork, where the system could not prevent it
            os._exit(0)
        data = json.dumps({**facts, "printed": printed.text}).encode() + b"\n"
        while data:
            data = data[write(events, data) :]

    report(event="loading", layers=layers)
    try:
        function, names = load(job["source"], job["function"])
    except BaseException as error:
        report(event="unusable", **failure(error))
        return
    if not callable(function):
        report(event="missing", names=names)
        return
    answer: dict[str, Any] = {}
    for number, case in enumerate(job["cases"]):
        report(event="call", case=number)
        if answer.get("error") != "MemoryError":  # the same again would take its time
            answer = call(function, case)
        report(event="answer", case=number, **answer)
    report(event="end")


def child(jobs: int, events: int, sandbox: Any, paths: list[str], ruleset: int) -> None:
    """Read one job, give up every right that it does not need, and run it. Does not return."""
    os.setsid()  # a process group of its own, so that it can be killed as a whole
    job = json.loads(_line(jobs))
    kept = sorted({0, 1, 2, events, ruleset} - {-1})
    for low, high in zip(kept, [*kept[1:], 4096], strict=True):
        os.closerange(low + 1, high)
    sys.modules["glassformer"] = None  # type: ignore[assignment]  # the solutions are there
    layers = sandbox.enter(job["seconds"], sandbox.mapped() + job["memory"], paths, ruleset)
    try:
        run(job, events, layers)
    finally:
        os._exit(0)  # skip threads and exit handlers of the student's code


def _line(descriptor: int) -> bytes:
    """Read a line and nothing after it: a length in decimal, a space, and as many bytes."""
    digits = b""
    while (one := os.read(descriptor, 1)) not in (b" ", b""):
        digits += one
    data, size = b"", int(digits or 0)
    while len(data) < size and (piece := os.read(descriptor, size - len(data))):
        data += piece
    return data


def wait(pid: int, seconds: float) -> tuple[int, bool]:
    """Wait for a child, and kill its process group at the end. Return its exit code and whether it was too late."""
    deadline, pause, late = time.monotonic() + seconds, 0.0005, False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended or late:
            break
        late = time.monotonic() > deadline
        if not late:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), late


def main() -> None:
    jobs, events, status = (int(word) for word in sys.argv[1:4])
    for name in sys.argv[4:]:
        importlib.import_module(name)
    sandbox = _load_sandbox()
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = sandbox.readable([package])
    ruleset = sandbox.landlock(paths)
    while seconds := _line(jobs):
        pid = os.fork()
        if not pid:
            try:
                child(jobs, events, sandbox, paths, ruleset)
            finally:
                os._exit(70)  # a child never goes on in this loop
        code, late = wait(pid, float(seconds))
        os.write(status, json.dumps({"code": code, "late": late}).encode() + b"\n")


if __name__ == "__main__":
    main()
