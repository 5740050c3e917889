"""Call a student's function in a separate process. Run by path, never imported: it imports NumPy and none of our code.

`python runner.py JOB FD`: JOB is a JSON file with the student's file, the function's name, the cases and the limits.
Events are written to the file descriptor FD as JSON lines, one before and one after each call, so that the reader knows
which call was running when the process ended. Nothing is graded here: the solution is not in this process.
"""

import io
import json
import os
import sys
import traceback
import types
import warnings
from typing import Any

import numpy as np

SHOWN = 2000
"""Number of characters of the student's output that are kept."""


class TruncatedOutput(io.TextIOBase):
    """Standard output of the student's code: the beginning is kept, the rest is dropped."""

    def __init__(self) -> None:
        self.text = ""

    def writable(self) -> bool:
        return True

    def write(self, words: str) -> int:
        self.text += words[: max(SHOWN - len(self.text), 0)]
        return len(words)


def limit(seconds: int, memory: int) -> None:
    """Limit processor time and memory, and forbid writing files."""
    import resource

    for kind, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0)):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, hard))


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
        return np.array(value["array"], dtype=value["dtype"]).reshape(value["shape"])
    return [decode(item) for item in value] if isinstance(value, list) else value


def failure(error: BaseException, file: str) -> dict[str, Any]:
    """Encode an exception as JSON, with the line number in the student's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else (lines[-1] if lines else None)
    words = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return {"error": type(error).__name__, "message": str(words)[:300], "line": line}


def call(function: Any, case: dict[str, Any], file: str) -> dict[str, Any]:
    """Call the function once with fresh arguments. Return its value or its error, and which arguments it modified."""
    arguments = {name: decode(value) for name, value in case.items()}
    try:
        value = function(*arguments.values())
    except BaseException as error:
        return {**failure(error, file), "changed": []}
    kept = {name: decode(value) for name, value in case.items()}
    changed = [name for name in kept if not _same(kept[name], arguments[name])]
    return {"value": encode(value), "changed": changed}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


def load(file: str, function: str) -> Any:
    """Load the student's file. Return the function, if there is one, and the names of all functions."""
    with open(file, encoding="utf-8") as source:
        code = compile(source.read(), file, "exec")
    module = types.ModuleType("answer")
    module.__file__ = file
    sys.modules["answer"] = module  # dataclasses, for example, look up their module
    sys.path.insert(0, os.path.dirname(file))
    exec(code, module.__dict__)
    return module.__dict__.get(function), sorted(n for n, v in module.__dict__.items() if callable(v) and n[0] != "_")


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as held:
        job = json.load(held)
    out = int(sys.argv[2])
    os.set_inheritable(out, False)
    printed = TruncatedOutput()
    sys.stdout = sys.stderr = printed
    warnings.simplefilter("ignore")  # an overflow is visible in the answer and explained there

    def report(**facts: Any) -> None:
        data = json.dumps({**facts, "printed": printed.text}).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]

    limit(job["seconds"], job["memory"])
    report(event="loading")
    try:
        function, names = load(job["file"], job["function"])
    except BaseException as error:
        report(event="unusable", **failure(error, job["file"]))
        os._exit(0)
    if not callable(function):
        report(event="missing", names=names)
        os._exit(0)
    for number, case in enumerate(job["cases"]):
        report(event="call", case=number)
        report(event="answer", case=number, **call(function, case, job["file"]))
    report(event="end")
    os._exit(0)  # skip threads and exit handlers of the student's code


if __name__ == "__main__":
    main()
