"""What CSCI 5922 PS4 Q3 prints, and the one exact example behind it.

Three tokens of width 4, one head of width 2, no positions. Indices are 1-based, as in the problem set. The document's
lines and its 18 inconsistencies are in `claims/printed.toml`; here is how the right values follow from the matrices.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib.resources import files
from typing import Any

import mpmath
from sympy import ImmutableMatrix as Matrix
from sympy import Rational


def matrix(text: str) -> Matrix:
    """Rows divided by semicolons, whole numbers and fractions by blanks."""
    return Matrix([[Rational(v) for v in row.split()] for row in text.split(";")])


def put(m: Matrix, changes: Mapping[tuple[int, int], Any]) -> Matrix:
    """Return `m` with other entries at 1-based indices."""
    return Matrix(*m.shape, lambda i, j: changes.get((i + 1, j + 1), m[i, j]))


INPUT = matrix("1 -1 0 2; 0 -1 2 1; -2 2 -1 0")
W_Q = matrix("0 1; 1 0; -1/2 0; 1 1")
W_K = matrix("1 -1/2; 0 1; 1/2 -1/2; 1 1/2")
W_V = matrix("1 1/2; -1/2 0; -1 2; 1/2 -1")
Q, K, V = (INPUT * w for w in (W_Q, W_K, W_V))
S = Q * K.T

DIGITS = 30
PLAIN, SCALED = Fraction(1), Fraction(1, 2)
"""The square of the factor on the scores: 1, or 1/d_k."""


def attention(squared: Fraction, scores: Matrix = S) -> tuple[Any, Any]:
    """Row softmax of the scores times sqrt(squared), and its product with V, as mpmath numbers."""
    with mpmath.workdps(DIGITS):
        factor = mpmath.sqrt(mpmath.mpf(squared.numerator) / squared.denominator)
        rows = []
        for row in scores.tolist():
            powers = [mpmath.exp(factor * v.numerator / v.denominator) for v in row]
            rows.append([p / mpmath.fsum(powers) for p in powers])
        columns = [[mpmath.mpf(v.numerator) / v.denominator for v in col] for col in V.T.tolist()]
        out = [[mpmath.fdot(row, col) for col in columns] for row in rows]
    return rows, out


PRINTED_Q = matrix("1 3; -1 1; 5/2 -2")
PRINTED_S = matrix("3/2 5/2 8; -7/2 -7/2 6; 17/2 8 -53/4")
W_Q_VARIANTS = {
    (1, 1): (Rational(0), Rational(2)),
    (2, 2): (Rational(0), Rational(2)),
    (3, 1): (Rational(-1), Rational(-1, 2)),
    (3, 2): (Rational(0), Rational(2)),
}
"""Entries that occur with two values, in the matrix and in the lines."""


@dataclass(frozen=True)
class Line:
    """One written-out product of a row of the input and a column of a weight: which numbers it uses, what it prints."""

    name: str
    literal: str
    """What the line as written adds up to."""
    printed: str
    uses: Mapping[str, str] = field(default_factory=dict)
    """Entries of the weight, such as "3,1", that it takes otherwise."""
    dropped: tuple[int, ...] = ()
    """Terms it leaves out."""

    def evaluate(self) -> Rational:
        """The line as written."""
        changes = {(int(at[0]), int(at[-1])): Rational(v) for at, v in self.uses.items()}
        weight = put(WEIGHTS[self.name[0]], changes)
        row, column = INPUT.row(int(self.name[1]) - 1), weight.col(int(self.name[2]) - 1)
        return sum(x * w for n, (x, w) in enumerate(zip(row, column, strict=True), 1) if n not in self.dropped)

    def correct(self) -> Rational:
        return RESULTS[self.name[0]][int(self.name[1]) - 1, int(self.name[2]) - 1]


WEIGHTS = {"Q": W_Q, "K": W_K, "V": W_V}
RESULTS = {"Q": Q, "K": K, "V": V}


@dataclass(frozen=True)
class Slip:
    """One inconsistency of the document: the printed and the right values by name."""

    where: str
    printed: Mapping[str, str]
    correct: Mapping[str, str]

    def shown(self) -> bool:
        """Whether every printed value differs from the right one, and the right ones are what follows."""
        apart = all(self.printed[name] != self.correct[name] for name in self.correct)
        follows = {name: right_values()[name] for name in self.correct}
        return apart and follows == dict(self.correct) and self.printed.keys() == self.correct.keys()


@cache
def right_values() -> dict[str, str]:
    """Return every value that a slip names, as it follows from the matrices above."""

    def shape(m: Matrix) -> str:
        return f"{m.rows} x {m.cols}"

    found = {f"W_{name}[{i + 1},{j + 1}]": str(w[i, j]) for name, w in WEIGHTS.items() for i, j in _indices(w)}
    found |= {f"{name}{i + 1}{j + 1}": str(m[i, j]) for name, m in RESULTS.items() for i, j in _indices(m)}
    found |= {f"S[{i + 1},{j + 1}]": str(S[i, j]) for i, j in _indices(S)}
    output = [[f"{float(v):.2f}" for v in row] for row in attention(PLAIN)[1]]
    found |= {f"Y{i}{j}": v for i, row in enumerate(output, 1) for j, v in enumerate(row, 1)}
    most = [f"{i} to {row.index(max(row)) + 1}" for i, row in enumerate(S.tolist(), 1)]
    return found | {
        "shape": shape(INPUT),
        "K": shape(K),
        "K^T": shape(K.T),
        "entries covered": shape(S),
        "denominator of row 1": " + ".join(f"e^{float(v):g}" for v in S.row(0)),
        "scale": f"1/sqrt({K.cols})",
        "outputs of 0.21": str(sum(row.count("0.21") for row in output)),
        "who attends to whom": ", ".join(most),
    }


def _indices(m: Matrix) -> list[tuple[int, int]]:
    return [(i, j) for i in range(m.rows) for j in range(m.cols)]


_DATA = tomllib.loads((files("glassformer.theory.claims") / "printed.toml").read_text(encoding="utf-8"))
LINES = tuple(Line(**{**line, "dropped": tuple(line.get("dropped", ()))}) for line in _DATA["line"])
STRUCK = tuple((literal, printed) for literal, printed in _DATA["struck"]["lines"])
"""The six struck-out lines of Q K^T, row by row: what each adds up to, what it prints."""
SLIPS = tuple(Slip(**slip) for slip in _DATA["slip"])
