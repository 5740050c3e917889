"""Grading: run the student's function in a separate, limited process and compare its answers in this process.

The solution is not in that process, so a file cannot grade itself. `sandbox.py` lists what the process may not do, and
docs/exercises.md what remains possible on which system.
"""

import json
import queue
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from glassformer.errors import plural
from glassformer.theory.exercises import judge
from glassformer.theory.exercises.exercise import Case, Exercise, ExerciseError
from glassformer.theory.exercises.worker import Worker

MEMORY = 2 << 30
"""Limit of memory in bytes, beyond what Python and its packages take."""
TORCH = ("torch", "torch._dynamo")
"""Modules that a worker imports for submissions that mention torch; optimizers need the second."""
LARGEST = 1 << 20
"""Largest size of a submission in bytes."""
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
    layers: tuple[str, ...] = ()
    """The layers of isolation that were in force: limits, audit, landlock, seccomp."""

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
            "isolation": list(self.layers),
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
            lines.append(f"reference solution: glass exercise {self.exercise.id} --solution")
        else:
            lines = [f"wrong: {name} is right in {self.passed} of {plural(self.cases, 'case')}."]
            lines += [f"  - {_ended(sentence)}" for sentence in self.sentences]
        if self.printed:
            lines.append("it printed:\n" + "\n".join(f"  | {line}" for line in self.printed.splitlines()[:20]))
        return "\n".join(lines)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith("?") else f"{sentence}."


def grade(
    exercise: Exercise, path: str | Path, *, seed: int = 0, seconds: int | None = None, memory: int = MEMORY
) -> Grade:
    """Run the function in the file on hidden cases and report what is wrong with it.

    `seed` draws the cases. `seconds` limits the processor time (default: the limit of the exercise), and `memory` the
    bytes that the submission may allocate. Use a `Grader` for many files.
    """
    with Grader() as grader:
        return grader.grade(exercise, path, seed=seed, seconds=seconds, memory=memory)


class Grader:
    """Grades many files with processes that are started once. Use it in a `with` statement; threads may share it."""

    def __init__(self, workers: int = 1):
        self._workers = workers
        self._free: dict[bool, queue.LifoQueue[Worker]] = {False: queue.LifoQueue(), True: queue.LifoQueue()}
        for torch, free in self._free.items():
            for _ in range(workers):
                free.put(Worker(TORCH if torch else ()))

    def __enter__(self) -> "Grader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Call it when nothing is being graded."""
        for free in self._free.values():
            while not free.empty():
                free.get().close()

    def grade(
        self,
        exercise: Exercise,
        path: str | Path,
        *,
        seed: int = 0,
        seconds: int | None = None,
        memory: int = MEMORY,
    ) -> Grade:
        """Grade one file, as the function `grade` does."""
        source = _read(exercise, Path(path))
        if isinstance(source, Grade):
            return source
        cases = exercise.cases(np.random.default_rng(seed))
        encoded = [{name: _encode(value) for name, value in case.arguments.items()} for case in cases]
        limit = exercise.seconds if seconds is None else seconds
        job = {"source": source, "function": exercise.function, "cases": encoded, "seconds": limit, "memory": memory}
        free = self._free["torch" in source]
        worker = free.get()
        try:
            ended = worker.run(job, 2 * limit)
        finally:
            free.put(worker)
        return _judge(exercise, cases, _events(ended.output, len(cases)), _ending(ended.code, ended.late, limit))

    def grade_all(self, submissions: Iterable[tuple[Exercise, str | Path]], *, seed: int = 0) -> Iterator[Grade]:
        """Grade pairs of an exercise and a file, as many at a time as there are workers, in their order."""
        with ThreadPoolExecutor(self._workers) as pool:
            yield from pool.map(lambda pair: self.grade(*pair, seed=seed), submissions)


def _read(exercise: Exercise, path: Path) -> str | Grade:
    """Return the text of a submission, or the grade of a file that is not one."""
    if not path.is_file():
        raise ExerciseError(f"{path} is not a file: give the Python file that defines {exercise.function}().")
    data = path.read_bytes()
    if len(data) > LARGEST:
        return Grade(exercise, UNGRADED, (f"the file has {len(data):,} bytes, and {LARGEST:,} are allowed",))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return Grade(exercise, UNGRADED, ("the file is not text: give a Python file in UTF-8",))


def _events(data: bytes, count: int) -> list[dict[str, Any]]:
    lines = data.split(b"\n")[:-1]  # an incomplete last line was cut off
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and _is_form(event, count):
            events.append(event)
    return events


def _is_form(event: dict[str, Any], count: int) -> bool:
    """Return whether an event has the fields of the runner, with values of their types."""
    if not FORMS.get(str(event.get("event")), {"?"}) <= event.keys():
        return False
    texts = all(isinstance(event.get(name, ""), str) for name in ("error", "message", "printed"))
    lists = all(isinstance(event.get(name, []), list) for name in ("changed", "names", "layers"))
    names = lists and all(isinstance(one, str) for name in ("changed", "names") for one in event.get(name, []))
    case, line = event.get("case", 0), event.get("line")
    numbers = isinstance(case, int) and 0 <= case < count and (line is None or isinstance(line, int))
    whole = "error" not in event or {"error", "message", "line"} <= event.keys()
    return texts and names and numbers and whole


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
    if isinstance(value, dict):
        return {"dict": {name: _encode(item) for name, item in value.items()}}
    return [_encode(item) for item in value] if isinstance(value, list) else value


def _judge(exercise: Exercise, cases: list[Case], events: list[dict[str, Any]], ended: str) -> Grade:
    last = events[-1] if events else {"event": "loading", "printed": ""}
    printed = str(last.get("printed", ""))
    layers = tuple(str(layer) for layer in events[0].get("layers", ())) if events else ()
    return replace(_graded(exercise, cases, events, last, ended), printed=printed, layers=layers)


def _graded(
    exercise: Exercise, cases: list[Case], events: list[dict[str, Any]], last: dict[str, Any], ended: str
) -> Grade:
    if last["event"] in ("loading", "unusable", "missing"):
        return Grade(exercise, UNGRADED, (_unusable(exercise, last, ended),))
    answers = {event["case"]: event for event in events if event["event"] == "answer"}
    unanswered = [case for number, case in enumerate(cases) if number not in answers]
    if unanswered:
        case = unanswered[0]
        sentence = f"for {case.label} it {ended}"
        passed = _count(exercise, cases, answers)
        return Grade(exercise, WRONG, (sentence,), len(cases), passed)
    sentences = _failures(exercise, cases, answers)
    if sentences:
        return Grade(exercise, WRONG, sentences, len(cases), _count(exercise, cases, answers))
    given = [judge.unpack(exercise, answers[n].get("value")) for n in range(len(cases))]
    found = judge.diagnose(exercise, cases, given)
    changed = sorted({name for answer in answers.values() for name in answer["changed"]})
    if changed:
        found += [f"it modifies its argument `{changed[0]}`: work on a copy"]
    wrong = judge.wrong_cases(exercise, cases, given)
    result = WRONG if found else RIGHT
    return Grade(exercise, result, tuple(found), len(cases), len(cases) - len(wrong))


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
        case "ValueError" if "could not be broadcast" in words:
            return f"raises {kind}{line}: {words}. Is keepdims=True missing in a sum, a mean or a maximum?"
        case "ValueError" if words.startswith("matmul"):
            sizes = words[words.rfind("(") + 1 : -1] if words.endswith(")") else words
            return f"multiplies matrices whose shapes do not fit{line} ({sizes}): is one of them to be transposed?"
        case "RecursionError":
            return f"calls itself endlessly{line}"
        case "PermissionError":
            return f"does what the grader forbids{line}: files, other programs and the network are closed to it"
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
        case "ValueError" if not event.get("line"):
            return "the file is not text: give a Python file in UTF-8"
        case "SystemExit":
            return f"the file ends the interpreter when it is loaded{line}: remove exit()"
    return f"the file cannot be loaded: it {_raised(event)}"
