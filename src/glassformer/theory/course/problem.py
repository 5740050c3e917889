"""A problem: a text with numbers drawn from a seed, an answer that is checked, known wrong answers with explanations.

The words are in a TOML file and the numbers in a Python file of the same name. A function in the Python file has the id
of the problem (with _ for -) and returns a `Drawn`. `<name>` in the words is replaced by the value of that name.
"""

import importlib.util
import random
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

from glassformer.errors import GlassformerError
from glassformer.theory.course.answers import Answer, Choice, decimal
from glassformer.theory.course.expressions import UnreadableError

TOPICS = ("attention", "positions", "block", "models", "decoding", "training", "theory")
"""The path by topic, in its order."""
RIGHT, WRONG, UNREADABLE = "right", "wrong", "unreadable"
TRIES = 200
HINTS = 3
PLACEHOLDER = re.compile(r"<([a-z_]\w*)>")


class CourseError(GlassformerError):
    """An unknown or invalid problem, sheet or file of the course. The message is one sentence."""


class Draw(random.Random):
    """Random numbers for a problem, with helpers for what problems need."""

    def integer(self, low: int, high: int) -> int:
        """Return a whole number from low to high, both included."""
        return self.randint(low, high)

    def vector(self, length: int, low: int = -3, high: int = 3) -> list[int]:
        return [self.randint(low, high) for _ in range(length)]

    def matrix(self, rows: int, columns: int, low: int = -3, high: int = 3) -> list[list[int]]:
        return [self.vector(columns, low, high) for _ in range(rows)]

    def shuffled(self, items: Mapping[str, str]) -> dict[str, str]:
        """Return the items in a random order."""
        keys = list(items)
        self.shuffle(keys)
        return {key: items[key] for key in keys}


@dataclass(frozen=True)
class Drawn:
    """What a draw gives: the answer, the values in the words, and for each known mistake the wrong answer."""

    answer: Answer
    values: Mapping[str, Any] = field(default_factory=dict)
    wrong: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mark:
    """The result of checking one answer. `mistake` is the key of the recognised mistake, or an empty string."""

    result: str
    message: str
    mistake: str = ""

    @property
    def right(self) -> bool:
        return self.result == RIGHT


@dataclass(frozen=True)
class Task:
    """A problem with its numbers."""

    problem: "Problem"
    seed: int
    drawn: Drawn

    @property
    def statement(self) -> str:
        """The statement; a choice also lists its options and reasons."""
        lines = [self._fill(self.problem.statement)]
        answer = self.drawn.answer
        if isinstance(answer, Choice):
            lines += [f"({letter}) {self._fill(answer.options[key])}" for letter, key in answer.lettered().items()]
            if answer.reasons:
                lines.append("Reason:")
            lines += [f"({number}) {self._fill(answer.reasons[key])}" for number, key in answer.numbered().items()]
        return "\n\n".join(lines)

    @property
    def hints(self) -> tuple[str, ...]:
        return tuple(self._fill(hint) for hint in self.problem.hints)

    @property
    def solution(self) -> str:
        return self._fill(self.problem.solution)

    @property
    def reference(self) -> str:
        """The right answer as a student would type it."""
        return self.drawn.answer.write(self.drawn.answer.value)

    @property
    def wrong(self) -> dict[str, str]:
        """Each known mistake and the answer that it gives, as text."""
        return {key: self.drawn.answer.write(value) for key, value in self.drawn.wrong.items()}

    def check(self, text: str) -> Mark:
        """Compare an answer with the reference and with the known mistakes."""
        answer = self.drawn.answer
        try:
            given = answer.read(text)
            if answer.same(given, answer.value):
                return Mark(RIGHT, "Right.")
            for key, value in self.drawn.wrong.items():
                if answer.same(given, value):
                    return Mark(WRONG, self._fill(self.problem.wrong[key]), key)
            return Mark(WRONG, answer.comment(given) or "This is not right.")
        except UnreadableError as error:
            return Mark(UNREADABLE, f"The answer cannot be read: {error}")

    def _fill(self, text: str) -> str:
        values = {**self.drawn.values, "answer": self.reference}
        return PLACEHOLDER.sub(lambda found: shown(values[found[1]]) if found[1] in values else found[0], text)


@dataclass(frozen=True)
class Problem:
    id: str
    title: str
    topic: str
    statement: str
    hints: tuple[str, ...]
    solution: str
    wrong: Mapping[str, str]
    """Each known mistake and its explanation."""
    draw: Callable[[Draw], Drawn]
    claims: tuple[str, ...] = ()
    """Ids of claims: `glass check ID --explain` prints the derivation, `--figure` draws the figure."""
    rows: tuple[str, ...] = ()
    """Rows of the sources (theory/claims/coverage.toml) that the problem practises."""

    def task(self, seed: int = 0) -> Task:
        """Return the problem with the numbers of a seed.

        A draw in which two mistakes coincide, or a mistake gives the right answer, is replaced by the next one.
        """
        for attempt in range(TRIES):
            task = Task(self, seed, self.draw(Draw(f"{self.id}/{seed}/{attempt}")))
            if _distinct(task):
                return task
        raise CourseError(f"problem {self.id!r} cannot be drawn: its wrong answers coincide in {TRIES} draws.")


def _distinct(task: Task) -> bool:
    return task.check(task.reference).right and all(task.check(text).mistake == key for key, text in task.wrong.items())


def shown(value: Any) -> str:
    """Return a value in a statement: LaTeX for fractions, vectors and matrices."""
    if isinstance(value, Fraction):
        if value.denominator == 1:
            return str(value.numerator)
        sign = "-" if value < 0 else ""
        return rf"{sign}\tfrac{{{abs(value.numerator)}}}{{{value.denominator}}}"
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        if value and isinstance(value[0], Sequence) and not isinstance(value[0], str):
            rows = r" \\ ".join(" & ".join(shown(x) for x in row) for row in value)
            return rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}"
        return "(" + ", ".join(shown(x) for x in value) + ")"
    return decimal(value)


NEEDED = {"id", "title", "topic", "statement", "hints", "solution", "wrong"}
FIELDS = {*NEEDED, "claims", "rows", "options", "reasons"}


def load(words: Path) -> list[Problem]:
    """Read the problems of a TOML file and run the Python file next to it that draws their numbers."""
    code = words.with_suffix(".py")
    try:
        rows = tomllib.loads(words.read_text(encoding="utf-8")).get("problem", [])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CourseError(f"{words} is not a TOML file ({error}): correct it.") from None
    if not code.is_file():
        raise CourseError(f"{words} needs the file {code.name} next to it, with one function for each problem.")
    spec = importlib.util.spec_from_file_location(f"glassformer_course_{words.stem}", code)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CourseError(f"{code} cannot be run ({type(error).__name__}: {error}): correct it.") from None
    return read(rows, module, str(words))


def read(rows: Sequence[Mapping[str, Any]], module: ModuleType, where: str) -> list[Problem]:
    """Return the problems of a parsed TOML file."""
    found = []
    for row in rows:
        name = str(row.get("id", "without an id"))
        missing = NEEDED - row.keys()
        if missing or row.keys() - FIELDS:
            odd = sorted(missing or row.keys() - FIELDS)[0]
            raise CourseError(f"{where}: problem {name} {'lacks' if missing else 'has an unknown field'} {odd!r}.")
        if row["topic"] not in TOPICS:
            raise CourseError(
                f"{where}: problem {name} has the topic {row['topic']!r}; use one of {', '.join(TOPICS)}."
            )
        if len(row["hints"]) != HINTS or not row["wrong"]:
            raise CourseError(f"{where}: problem {name} needs {HINTS} hints and at least one entry in [problem.wrong].")
        draw = _choosing(row) if "options" in row else getattr(module, name.replace("-", "_"), None)
        if not callable(draw):
            raise CourseError(
                f"{where}: there is no function {name.replace('-', '_')}() in the Python file next to it."
            )
        fields: dict[str, Any] = {key: tuple(row.get(key, ())) for key in ("hints", "claims", "rows")}
        fields |= {key: row[key].strip() for key in ("id", "title", "topic", "statement", "solution")}
        found.append(Problem(**fields, wrong=dict(row["wrong"]), draw=draw))
    return found


def _choosing(row: Mapping[str, Any]) -> Callable[[Draw], Drawn]:
    """Return the draw of a choice: the first option and the first reason are right, and the draw shuffles them."""
    options, reasons = row["options"], row.get("reasons", {})
    keys = [*[*options][1:], *[*reasons][1:]]

    def draw(rng: Draw) -> Drawn:
        answer = Choice(rng.shuffled(options), next(iter(options)), rng.shuffled(reasons), next(iter(reasons), ""))
        return Drawn(answer, {}, {key: key for key in keys})

    return draw
