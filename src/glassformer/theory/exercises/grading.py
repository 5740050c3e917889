"""Grading: run the student's function in a separate process with limits and compare its answers in this process.

The solution is not in that process, so a file cannot grade itself. The limits protect against accidents such as endless
loops or lists, not against an attacker: grade files of people you trust, or use a container.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.errors import plural
from glassformer.theory.exercises import judge
from glassformer.theory.exercises.exercise import Case, Exercise, ExerciseError

SECONDS = 10
"""Limit of processor time; the limit of wall-clock time is twice this."""
MEMORY = 4 << 30
"""Limit of address space in bytes: importing torch alone reserves two gigabytes."""
RIGHT, WRONG, UNGRADED = "right", "wrong", "ungraded"
FORMS: dict[str, set[str]] = {
    "loading": set(),
    "unusable": {"error", "message", "line"},
    "missing": {"names"},
    "call": {"case"},
    "answer": {"case", "changed"},
    "end": set(),
}
"""Events of the runner and their required fields. Anything else on its channel was written by the student's code and is
ignored."""
RUNNER = Path(__file__).with_name("runner.py")


@dataclass(frozen=True)
class Grade:
    """The result of grading one file. `ungraded` means that the file provides no function to call."""

    exercise: Exercise
    result: str
    sentences: tuple[str, ...] = ()
    """What is wrong, or why the file could not be graded."""
    cases: int = 0
    passed: int = 0
    printed: str = ""
    """The beginning of what the student's file printed."""

    @property
    def exit_code(self) -> int:
        return {RIGHT: 0, WRONG: 1, UNGRADED: 2}[self.result]

    def to_dict(self) -> dict[str, Any]:
        return {
            "exercise": self.exercise.id,
            "result": self.result,
            "wrong": list(self.sentences),
            "cases": self.cases,
            "passed": self.passed,
            "printed": self.printed,
        }

    def text(self) -> str:
        """Return the report for the terminal."""
        name = f"{self.exercise.function}()"
        if self.result == UNGRADED:
            lines = [f"could not be graded: {_ended(sentence)}" for sentence in self.sentences]
        elif self.result == RIGHT:
            lines = [f"right: {name} agrees with the solution in all {plural(self.cases, 'case')}."]
            if self.exercise.claims:
                lines.append(f"related claims: glass check {' '.join(self.exercise.claims)} --explain")
        else:
            lines = [f"wrong: {name} is right in {self.passed} of {plural(self.cases, 'case')}."]
            lines += [f"  - {_ended(sentence)}" for sentence in self.sentences]
        if self.printed:
            lines.append("it printed:\n" + "\n".join(f"  | {line}" for line in self.printed.splitlines()[:20]))
        return "\n".join(lines)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith("?") else f"{sentence}."


def grade(exercise: Exercise, path: str | Path, *, seconds: int = SECONDS, memory: int = MEMORY) -> Grade:
    """Run the function in the file on hidden cases and report what is wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise ExerciseError(f"{path} is not a file: give the Python file that defines {exercise.function}().")
    cases = exercise.cases(np.random.default_rng(0))
    events, ended = _run(exercise, path.resolve(), cases, seconds, memory)
    return _judge(exercise, cases, events, ended)


def _run(
    exercise: Exercise, path: Path, cases: list[Case], seconds: int, memory: int
) -> tuple[list[dict[str, Any]], str]:
    """Run the process. Return its events and, if it ended early, the reason."""
    encoded = [{name: _encode(value) for name, value in case.arguments.items()} for case in cases]
    job = {"file": str(path), "function": exercise.function, "cases": encoded, "seconds": seconds, "memory": memory}
    one_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR", "SYSTEMROOT") if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="glass-exercise-") as folder:
        job_file = Path(folder, "job.json")
        job_file.write_text(json.dumps(job), encoding="utf-8")
        ours, theirs = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(RUNNER), str(job_file), str(theirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs,),
            cwd=folder,
            env={**kept, **one_thread},
            start_new_session=True,  # a process group of its own, so that it can be killed as a whole
        )
        os.close(theirs)
        try:
            data, late = _read_output(process, ours, time.monotonic() + 2 * seconds)
        finally:
            os.close(ours)
            _end(process)
    return _events(data), _ending(process.returncode, late, seconds)


def _read_output(process: subprocess.Popen[bytes], ours: int, deadline: float) -> tuple[bytes, bool]:
    """Read the process's output until it ends or times out. A surviving grandchild process is not waited for."""
    data = b""
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 0.05)
        if ready:
            piece = os.read(ours, 1 << 16)
            if not piece:
                process.wait(timeout=max(deadline - time.monotonic(), 0.1))
                return data, False
            data += piece
        elif process.poll() is not None:
            return data, False
    return data, True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and every process that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _events(data: bytes) -> list[dict[str, Any]]:
    lines = data.split(b"\n")[:-1]  # an incomplete last line was cut off
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        known = isinstance(event, dict) and FORMS.get(str(event.get("event")), {"?"}) <= event.keys()
        if known and isinstance(event.get("case", 0), int):
            events.append(event)
    return events


def _ending(code: int, late: bool, seconds: int) -> str:
    """Return why a process ended early, as the words that follow "it"."""
    if late or code == -signal.SIGXCPU:
        return f"did not finish within {seconds} seconds: is there an endless loop?"
    if code < 0:
        return "was killed: it used too much memory, or a library crashed"
    return "ended the process: remove os._exit() and similar calls"


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype), "shape": list(value.shape)}
    return value


def _judge(exercise: Exercise, cases: list[Case], events: list[dict[str, Any]], ended: str) -> Grade:
    last = events[-1] if events else {"event": "loading", "printed": ""}
    printed = str(last.get("printed", ""))
    if last["event"] in ("loading", "unusable", "missing"):
        return Grade(exercise, UNGRADED, (_unusable(exercise, last, ended),), printed=printed)
    answers = {event["case"]: event for event in events if event["event"] == "answer"}
    unanswered = [case for number, case in enumerate(cases) if number not in answers]
    if unanswered:
        case = unanswered[0]
        sentence = f"for {case.label} it {ended}"
        passed = _count(exercise, cases, answers)
        return Grade(exercise, WRONG, (sentence,), len(cases), passed, printed)
    sentences = _failures(exercise, cases, answers)
    if sentences:
        return Grade(exercise, WRONG, sentences, len(cases), _count(exercise, cases, answers), printed)
    given = [judge.unpack(exercise, answers[n].get("value")) for n in range(len(cases))]
    found = judge.diagnose(exercise, cases, given)
    changed = sorted({name for answer in answers.values() for name in answer["changed"]})
    if changed:
        found += [f"it modifies its argument `{changed[0]}`: work on a copy"]
    wrong = judge.wrong_cases(exercise, cases, given)
    result = WRONG if found else RIGHT
    return Grade(exercise, result, tuple(found), len(cases), len(cases) - len(wrong), printed)


def _count(exercise: Exercise, cases: list[Case], answers: dict[int, dict[str, Any]]) -> int:
    """Count the correct answers when some calls gave no answer."""
    passed = 0
    for number, answer in answers.items():
        try:
            given = judge.unpack(exercise, answer.get("value"))
        except judge.FormError:
            continue
        passed += judge.is_right(exercise, cases[number], given)
    return passed


def _failures(exercise: Exercise, cases: list[Case], answers: dict[int, dict[str, Any]]) -> tuple[str, ...]:
    """Describe the calls that raised or returned a value of the wrong type, one sentence for each kind of failure."""
    found: dict[Any, str] = {}
    for number, answer in sorted(answers.items()):
        hint = f" ({cases[number].hint})" if cases[number].hint else ""
        if "error" in answer:
            kind = (answer["error"], answer["line"])
            found.setdefault(kind, f"for {cases[number].label} it {_raised(answer)}{hint}")
            continue
        try:
            judge.unpack(exercise, answer.get("value"))
        except judge.FormError as form:
            found.setdefault("form", str(form))
    return tuple(found.values())


def _raised(failure: dict[str, Any]) -> str:
    kind, words = failure["error"], failure["message"]
    line = f" in line {failure['line']}" if failure.get("line") else ""
    match kind:
        case "SystemExit":
            return f"ends the interpreter{line}: remove exit()"
        case "MemoryError":
            return f"needs more memory than the limit{line}"
        case "NameError" if "'np'" in words or "'numpy'" in words:
            return f"uses np{line} without importing it: begin the file with `import numpy as np`"
        case "ModuleNotFoundError":
            return f"imports a package that is not installed{line}: {words}"
        case "TypeError" if "positional argument" in words:
            return f"cannot be called with the arguments of the exercise: {words}"
        case "RecursionError":
            return f"calls itself endlessly{line}"
    return f"raises {kind}{line}: {words}" if words else f"raises {kind}{line}"


def _unusable(exercise: Exercise, event: dict[str, Any], ended: str) -> str:
    if event["event"] == "missing":
        others = [name for name in event["names"] if name != exercise.function]
        there = f"; it defines {', '.join(others[:5])}" if others else ""
        return f"the file defines no function {exercise.function}(){there}"
    if event["event"] == "loading":
        return f"while the file was loading, it {ended}"
    line = f" in line {event['line']}" if event.get("line") else ""
    match event["error"]:
        case "SyntaxError" | "IndentationError" | "TabError":
            return f"the file is not valid Python: {event['message']}{line}"
        case "UnicodeDecodeError" | "ValueError" if not event.get("line"):
            return "the file is not text: give a Python file in UTF-8"
        case "SystemExit":
            return f"the file ends the interpreter when it is loaded{line}: remove exit()"
    return f"the file cannot be loaded: it {_raised(event)}"
