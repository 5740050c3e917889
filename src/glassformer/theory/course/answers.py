"""Kinds of answers: number, formula, matrix, true or false with a counterexample, choice with a reason.

Each kind reads a text, compares it with the reference (`same`), and writes values as a student would (`write`).
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

from glassformer.theory.course import expressions, notation, relations
from glassformer.theory.course.expressions import UnreadableError

TOLERANCE = 5e-3
"""Relative tolerance of numbers that are not whole: three significant digits are enough."""
NEGLIGIBLE = 1e-25
"""Relative difference below which two values of 40 digits are equal."""

WHOLE: tuple[int, ...] = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 19, 24, 31, 64)
POSITIVE: tuple[Any, ...] = (
    Fraction(1, 7),
    Fraction(2, 3),
    1,
    Fraction(17, 12),
    2,
    Fraction(31, 9),
    5,
    Fraction(47, 6),
)
REAL: tuple[Any, ...] = (*POSITIVE, *(-x for x in POSITIVE), 0)
UNIT: tuple[Any, ...] = (
    Fraction(1, 9),
    Fraction(1, 4),
    Fraction(3, 7),
    Fraction(1, 2),
    Fraction(5, 8),
    Fraction(9, 10),
)
DOMAINS = {"whole": WHOLE, "positive": POSITIVE, "real": REAL, "unit": UNIT}
"""Values at which formulas are compared, for each kind of letter."""


def decimal(value: Any) -> str:
    """Return a number as text: whole numbers in full, others with six significant digits."""
    if isinstance(value, int) or (isinstance(value, Fraction) and value.denominator == 1):
        return str(int(value))
    return f"{float(value):.6g}"


def _near(given: Any, value: Any, tolerance: float) -> bool:
    return bool(abs(given - expressions.to_mpf(value)) <= tolerance * abs(float(value)) + (1e-9 if value == 0 else 0))


@dataclass(frozen=True)
class Number:
    """A number or a fraction. An `int` must be exact; other values may be rounded to three significant digits."""

    value: Any
    tolerance: float = TOLERANCE
    kind: ClassVar[str] = "number"

    @property
    def prompt(self) -> str:
        return "a whole number" if isinstance(self.value, int) else "a number: a decimal, a fraction or a formula"

    def read(self, text: str) -> Any:
        return expressions.number(text)

    def same(self, given: Any, value: Any) -> bool:
        return _near(given, value, NEGLIGIBLE if isinstance(value, int) else self.tolerance)

    def write(self, value: Any) -> str:
        return _entry(value)

    def comment(self, given: Any) -> str:
        """Return what a wrong answer has in common with the right one, or an empty string."""
        return relations.of_number(given, expressions.to_mpf(self.value), isinstance(self.value, int))


@dataclass(frozen=True)
class Formula:
    """A formula in letters. Two formulas are equal if they agree to 25 digits at fourteen points of the domain."""

    value: str
    letters: Mapping[str, str]
    """Each letter and the name of its domain in DOMAINS."""
    kind: ClassVar[str] = "formula"

    @property
    def prompt(self) -> str:
        return f"a formula in {', '.join(self.letters)}"

    def read(self, text: str) -> Any:
        tree = expressions.parse(notation.LEADING.sub("", text), tuple(self.letters))
        self._values(tree)  # refuses a formula that has no value somewhere in the domain
        return tree

    def _values(self, tree: Any) -> tuple[tuple[str, Any], ...]:
        return _values(tree, tuple(self.letters.items()))

    def same(self, given: Any, value: Any) -> bool:
        return self._difference(given, value) is None

    def _difference(self, given: Any, value: str) -> tuple[str, Any, Any] | None:
        """Return the first point at which two formulas differ, and their values there."""
        right = expressions.parse(value, tuple(self.letters))
        for (where, x), (_, y) in zip(self._values(given), self._values(right), strict=True):
            if abs(x - y) > NEGLIGIBLE * (1 + abs(y)):
                return where, x, y
        return None

    def write(self, value: Any) -> str:
        return str(value)

    def comment(self, given: Any) -> str:
        found = self._difference(given, self.value)
        if found is None:
            return ""
        where, x, y = found
        right = expressions.parse(self.value, tuple(self.letters))
        values = [[one for _, one in self._values(tree)] for tree in (given, right)]
        related = relations.of_formula(*values)
        return related or f"For {where} it gives {float(x):.6g}, and the right value is {float(y):.6g}."


@functools.lru_cache(maxsize=512)
def _values(tree: Any, letters: tuple[tuple[str, str], ...]) -> tuple[tuple[str, Any], ...]:
    """Return the points of the domain, as text, each with the value of a formula there."""
    found = []
    for point in expressions.points({letter: DOMAINS[domain] for letter, domain in letters}):
        where = ", ".join(f"{letter} = {value}" for letter, value in point.items())
        try:
            found.append((where, expressions.evaluate(tree, point)))
        except UnreadableError as error:
            raise UnreadableError(f"for {where}: {error}") from None
    return tuple(found)


def read_rows(text: str) -> list[list[Any]]:
    """Read `1 2; 3 4`, `[[1, 2], [3, 4]]` or one row `1, 2` as rows of numbers."""
    if len(text) > 4 * expressions.LONGEST:
        raise UnreadableError("the matrix is too long: give numbers with fewer digits.")
    plain = re.sub(r"\]\s*,\s*\[", ";", notation.rows(text))
    plain = re.sub(r"[\[\]]", " ", plain).replace("\n", ";")
    rows = [row.strip() for row in plain.split(";") if row.strip()]
    if not rows:
        raise UnreadableError("the answer is empty: type rows such as 1 2; 3 4.")
    found = [[expressions.number(cell) for cell in (row.split(",") if "," in row else row.split())] for row in rows]
    if len({len(row) for row in found}) > 1:
        raise UnreadableError("the rows have different lengths: separate rows by ; and numbers by spaces or commas.")
    return found


@dataclass(frozen=True)
class Matrix:
    """A matrix or a vector (one row), entry by entry."""

    value: Sequence[Sequence[Any]]
    tolerance: float = TOLERANCE
    absolute: float = 5e-4
    kind: ClassVar[str] = "matrix"

    @property
    def prompt(self) -> str:
        rows, columns = len(self.value), len(self.value[0])
        if rows == 1:
            return f"{columns} numbers ({', '.join(map(str, range(1, columns + 1)))})"
        return f"a {rows} by {columns} matrix, rows separated by semicolons (1 2; 3 4)"

    def read(self, text: str) -> Any:
        found = read_rows(text)
        if len(self.value) == 1 and len(found) == len(self.value[0]) and all(len(row) == 1 for row in found):
            return [[row[0] for row in found]]  # a column where a vector was asked for
        return found

    def same(self, given: Any, value: Any) -> bool:
        if (len(given), len(given[0])) != (len(value), len(value[0])):
            return False
        pairs = [(g, v) for row, wanted in zip(given, value, strict=True) for g, v in zip(row, wanted, strict=True)]
        return all(_near(g, v, self.tolerance) or (not isinstance(v, int) and abs(g - float(v)) < self.absolute)
                   for g, v in pairs)  # fmt: skip

    def write(self, value: Any) -> str:
        return "; ".join(", ".join(_entry(x) for x in row) for row in value)

    def comment(self, given: Any) -> str:
        shape, wanted = (len(given), len(given[0])), (len(self.value), len(self.value[0]))
        if shape != wanted:
            return f"The answer is {shape[0]} by {shape[1]}; {wanted[0]} by {wanted[1]} is needed."
        related = relations.of_matrix(given, self.value, self.same)
        if related:
            return related
        wrong = [(i, j) for i, row in enumerate(self.value) for j, v in enumerate(row)
                 if not self.same([[given[i][j]]], [[v]])]  # fmt: skip
        i, j = wrong[0]
        return f"{len(wrong)} of {wanted[0] * wanted[1]} entries differ; the first is in row {i + 1}, column {j + 1}."


def _entry(value: Any) -> str:
    """Return a number as a student types it: fractions exactly, others as decimals."""
    whole = isinstance(value, Fraction) and value.denominator == 1
    return str(value) if isinstance(value, Fraction) and not whole else decimal(value)


@dataclass(frozen=True)
class TrueFalse:
    """True, or false with a counterexample that is checked.

    `refute(rows)` returns an empty string if the rows of numbers are a counterexample, otherwise the reason why not.
    """

    value: bool
    refute: Callable[[list[list[Any]]], str] | None = None
    example: str = ""
    """A counterexample, if the statement is false; its form is shown if `form` is empty."""
    form: str = ""
    """What a counterexample consists of."""
    kind: ClassVar[str] = "truth"

    @property
    def prompt(self) -> str:
        form = self.form or "numbers"
        return f"true, or false with a counterexample (false: {form})" if self.refute else "true or false"

    def read(self, text: str) -> Any:
        found = re.fullmatch(r"\s*(true|false|yes|no)\b\s*[:,;.]?\s*(.*)", text, re.IGNORECASE | re.DOTALL)
        if found is None:
            raise UnreadableError("the answer must begin with true or false.")
        truth = found[1].lower() in ("true", "yes")
        rows = read_rows(found[2]) if found[2].strip() and not truth else None
        if not truth and rows is None and self.refute:
            raise UnreadableError(f"a counterexample is needed: write `false: {self.form or 'numbers'}`.")
        return truth, rows

    def same(self, given: Any, value: Any) -> bool:
        truth, rows = given
        if isinstance(value, str):  # a recorded wrong answer
            other = self.read(value)
            return bool(truth == other[0] and (rows is None) == (other[1] is None) and _equal_rows(rows, other[1]))
        return bool(truth == value and (truth or self.refute is None or not self.refute(rows)))

    def write(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        return "true" if value else f"false: {self.example}" if self.refute else "false"

    def comment(self, given: Any) -> str:
        truth, rows = given
        if truth == self.value and rows is not None and self.refute:
            return f"The statement is false, and this is not a counterexample: {self.refute(rows)}"
        if rows is not None and self.refute:
            reason = self.refute(rows)
            return f"This is not a counterexample: {reason}" if reason else ""
        return ""


def _equal_rows(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(
        len(x) == len(y) and all(abs(p - q) < 1e-12 for p, q in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


@dataclass(frozen=True)
class Choice:
    """One of several options and the reason for it: `b 2`. Options are lettered and reasons numbered as drawn."""

    options: Mapping[str, str]
    """Each option's key and text; `right` is the key of the right one."""
    right: str
    reasons: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    kind: ClassVar[str] = "choice"

    @property
    def value(self) -> tuple[str, str]:
        return self.right, self.reason

    @property
    def prompt(self) -> str:
        return "a letter and the number of a reason, such as a 1" if self.reasons else "a letter"

    def lettered(self) -> dict[str, str]:
        return {chr(97 + n): key for n, key in enumerate(self.options)}

    def numbered(self) -> dict[str, str]:
        return {str(n): key for n, key in enumerate(self.reasons, 1)}

    def read(self, text: str) -> Any:
        found = re.fullmatch(r"\s*\(?([A-Za-z])\)?[\s,.:;]*\(?(\d?)\)?\s*", text)
        if found is None or found[1].lower() not in self.lettered():
            raise UnreadableError(f"the answer must be one of the letters {', '.join(self.lettered())}.")
        if self.reasons and found[2] not in self.numbered():
            raise UnreadableError(f"a reason is needed: add one of the numbers {', '.join(self.numbered())}.")
        return self.lettered()[found[1].lower()], self.numbered().get(found[2], "")

    def same(self, given: Any, value: Any) -> bool:
        """Compare with (option, reason), or with the key of a wrong option or reason alone."""
        if isinstance(value, str):
            right_option = given[0] == self.right
            return bool(given[0] == value or (right_option and given[1] == value))
        return bool(given == value)

    def write(self, value: Any) -> str:
        option, reason = value if isinstance(value, tuple) else self._with(value)
        letters = {key: letter for letter, key in self.lettered().items()}
        numbers = {key: number for number, key in self.numbered().items()}
        return f"{letters[option]} {numbers.get(reason, '')}".strip()

    def _with(self, key: str) -> tuple[str, str]:
        return (key, self.reason) if key in self.options else (self.right, key)

    def comment(self, given: Any) -> str:
        return ""


Answer = Number | Formula | Matrix | TrueFalse | Choice
