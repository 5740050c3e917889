"""Describe how a wrong number, formula or matrix is related to the right one, if the relation is simple."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import mpmath

DIGITS = 40
EXACT = 1e-9
"""Relative tolerance where the right value is a whole number."""
ROUNDED = 1e-3
"""Relative tolerance elsewhere: students round."""
MIXED = "are degrees and radians mixed up?"
RELATIONS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("The sign is wrong.", lambda y: -y),
    ("The answer is twice the right value.", lambda y: 2 * y),
    ("The answer is half the right value.", lambda y: y / 2),
    ("The answer is ten times the right value.", lambda y: 10 * y),
    ("The answer is a tenth of the right value.", lambda y: y / 10),
    ("The answer is a hundred times the right value: write a percentage with the sign %.", lambda y: 100 * y),
    ("The answer is a hundredth of the right value: leave out the sign %, or multiply by 100.", lambda y: y / 100),
    ("This is the reciprocal of the right value.", lambda y: 1 / y),
    ("This is the square of the right value.", lambda y: y * y),
    ("This is the square root of the right value.", lambda y: mpmath.sqrt(y) if y > 0 else mpmath.nan),
    ("This is 1 minus the right value.", lambda y: 1 - y if 0 < y < 1 else mpmath.nan),
    (f"The answer is 180/π times the right value: {MIXED}", lambda y: y * 180 / mpmath.pi),
    (f"The answer is π/180 times the right value: {MIXED}", lambda y: y * mpmath.pi / 180),
)
"""Sentences, each with the wrong answer that it describes for a right value."""


def of_number(given: Any, value: Any, whole: bool) -> str:
    """Return how a number is related to the right one, or an empty string."""
    tolerance = EXACT if whole else ROUNDED
    if value == 0:
        return ""
    for sentence, wrong in RELATIONS:
        if _near(given, wrong(value), tolerance):
            return sentence
    if whole and _near(given, value, 0.01):
        return "The answer is close: here every unit counts."
    if not whole and _near(given, value, 0.03):
        return "The answer is close: do not round before the last step, and give three digits."
    if given * value < 0:
        return "This is not right: the sign is wrong as well."
    return f"This is not right: the value is too {'large' if abs(given) > abs(value) else 'small'}."


def _near(x: Any, y: Any, tolerance: float) -> bool:
    return bool(abs(x - y) <= tolerance * abs(y))


SHAPES: dict[str, Callable[[Any], Any]] = {"square": lambda y: y * y, "reciprocal": lambda y: 1 / y}


def of_formula(given: Sequence[Any], right: Sequence[Any]) -> str:
    """Return how the values of a formula are related to those of the right one at the same points, or nothing."""
    pairs = [(x, y) for x, y in zip(given, right, strict=True) if y != 0]
    zeros = [x for x, y in zip(given, right, strict=True) if y == 0]
    if len(pairs) < 2 or any(zeros):
        return ""
    with mpmath.workdps(DIGITS):
        return _of_pairs(pairs)


def _of_pairs(pairs: Sequence[tuple[Any, Any]]) -> str:
    same = [name for name, wrong in SHAPES.items() if _all(pairs, wrong)]
    if same:
        return f"This is the {same[0]} of the right formula."
    if all(y > 0 for _, y in pairs) and _all(pairs, mpmath.sqrt):
        return "This is the square root of the right formula."
    factor = pairs[0][0] / pairs[0][1]
    if factor and _all(pairs, lambda y: factor * y):
        return "The sign is wrong." if factor == -1 else f"This is {_simple(factor)} times the right formula."
    return ""


def _all(pairs: Sequence[tuple[Any, Any]], wrong: Callable[[Any], Any]) -> bool:
    return all(_near(x, wrong(y), 1e-25) for x, y in pairs)


def _simple(factor: Any) -> str:
    """Return a factor as a fraction if it is a simple one, otherwise as a decimal."""
    near = Fraction(float(factor)).limit_denominator(1000)
    return str(near) if abs(factor - mpmath.mpf(near.numerator) / near.denominator) < 1e-20 else f"{float(factor):.6g}"


Rows = Sequence[Sequence[Any]]


def of_matrix(given: Rows, right: Rows, same: Callable[[Rows, Rows], bool]) -> str:
    """Return how a matrix of the right shape is related to the right one, or an empty string."""
    columns = [list(column) for column in zip(*right, strict=True)]
    if len(right) == len(right[0]) and same(given, columns):
        return "This is the transpose of the right matrix."
    if same([[-x for x in row] for row in given], right):
        return "Every sign is wrong."
    ratios = [x / y for row, wanted in zip(given, right, strict=True) for x, y in zip(row, wanted, strict=True) if y]
    if len(ratios) > 1 and ratios[0] and same([[x / ratios[0] for x in row] for row in given], right):
        return f"Every entry is {float(ratios[0]):.4g} times the right one."
    if len(right) > 1 and _reordered(given, right, same):
        return "The rows are right, but in another order."
    across = [list(column) for column in zip(*given, strict=True)]
    if len(columns) > 1 and _reordered(across, columns, same):
        return "The columns are right, but in another order." if len(right) > 1 else "The numbers are in another order."
    return ""


def _reordered(given: Rows, right: Rows, same: Callable[[Rows, Rows], bool]) -> bool:
    left = list(right)
    for row in given:
        found = next((n for n, wanted in enumerate(left) if same([row], [wanted])), None)
        if found is None:
            return False
        left.pop(found)
    return True
