"""What CSCI 5922 PS4 Q3 prints, and the one exact example behind it.

Three tokens of width 4, one head of width 2, no positions. Indices are 1-based, as in the problem set. The document's
18 inconsistencies are data here: what is printed, what is right, and how the right value follows from the matrices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
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
    uses: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Entries of the weight that it takes otherwise."""
    dropped: tuple[int, ...] = ()
    """Terms it leaves out."""

    def evaluate(self) -> Rational:
        """The line as written."""
        weight = put(WEIGHTS[self.name[0]], {at: Rational(v) for at, v in self.uses.items()})
        row, column = INPUT.row(int(self.name[1]) - 1), weight.col(int(self.name[2]) - 1)
        return sum(x * w for n, (x, w) in enumerate(zip(row, column, strict=True), 1) if n not in self.dropped)

    def correct(self) -> Rational:
        return RESULTS[self.name[0]][int(self.name[1]) - 1, int(self.name[2]) - 1]


WEIGHTS = {"Q": W_Q, "K": W_K, "V": W_V}
RESULTS = {"Q": Q, "K": K, "V": V}

LINES = (
    Line("Q11", "3", "1", {(1, 1): "2"}),
    Line("Q12", "1", "3", {(2, 2): "2"}),
    Line("Q21", "-1", "-1"),
    Line("Q22", "3", "1", {(2, 2): "2", (3, 2): "2"}),
    Line("Q31", "-3/2", "5/2", {(1, 1): "2"}),
    Line("Q32", "0", "-2", {(2, 2): "2", (3, 2): "2"}),
    Line("K11", "7/2", "3", {(2, 1): "-1/2"}),
    Line("K12", "-5/2", "-1", {(4, 2): "-1/2"}),
    Line("K21", "1/2", "-1", {(2, 1): "-1/2", (4, 1): "-1"}),
    Line("K22", "-5/2", "-3/2", {(4, 2): "-1/2"}),
    Line("K31", "-3", "-5/2", {(2, 1): "-1/2"}, dropped=(3,)),
    Line("K32", "7/2", "3/2"),
    Line("V12", "-5/2", "-3/2", {(1, 2): "-1/2", (3, 2): "1"}),
    Line("V21", "-2", "-1", {(4, 1): "-1/2"}),
    Line("V32", "-1", "-3", {(1, 2): "-1/2"}),
)

STRUCK = (("-1/2", "1/2"), ("1", "1"), ("-3/2", "-1/2"), ("1", "1/2"), ("11/4", "5/2"), ("-7/4", "-3/2"))
"""The six struck-out lines of Q K^T, row by row: what each adds up to, what it prints."""


@dataclass(frozen=True)
class Slip:
    """One inconsistency of the document."""

    number: int
    where: str
    printed: Mapping[str, str]
    correct: Mapping[str, str]
    derive: Callable[[], Mapping[str, str]]
    """The right values, from the matrices above."""

    def shown(self) -> bool:
        """Whether every printed value differs from the right one, and the right ones are what follows."""
        apart = all(self.printed[name] != self.correct[name] for name in self.correct)
        return apart and dict(self.derive()) == dict(self.correct) and self.printed.keys() == self.correct.keys()


def _entries(letter: str, *indices: str) -> Callable[[], dict[str, str]]:
    """Entries like "31" of a weight, as texts."""
    weight = WEIGHTS[letter]
    return lambda: {f"W_{letter}[{p[0]},{p[1]}]": str(weight[int(p[0]) - 1, int(p[1]) - 1]) for p in indices}


def _results(*names: str) -> Callable[[], dict[str, str]]:
    """Entries like "V12" of Q, K and V, as texts."""
    return lambda: {name: str(Line(name, "", "").correct()) for name in names}


def _shape(m: Matrix) -> str:
    return f"{m.rows} x {m.cols}"


def _column_denominator() -> dict[str, str]:
    """What row 1 of the softmax divides by: the exponents of row 1 of S."""
    return {"denominator of row 1": " + ".join(f"e^{float(v):g}" for v in S.row(0))}


def _rounded_output() -> dict[str, str]:
    last = attention(PLAIN)[1][2]
    return {"Y31": f"{float(last[0]):.2f}", "Y32": f"{float(last[1]):.2f}"}


def _argmax() -> dict[str, str]:
    return {
        "who attends to whom": ", ".join(f"{i} to {row.index(max(row)) + 1}" for i, row in enumerate(S.tolist(), 1))
    }


def _stray() -> dict[str, str]:
    numbers = [f"{float(v):.2f}" for row in attention(PLAIN)[1] for v in row]
    return {"outputs of 0.21": str(numbers.count("0.21"))}


SLIPS = (
    Slip(1, "W_Q as a matrix", {"W_Q[3,1]": "-1"}, {"W_Q[3,1]": "-1/2"}, _entries("Q", "31")),
    Slip(
        2,
        "lines of Q",
        {"W_Q[1,1]": "2", "W_Q[2,2]": "2"},
        {"W_Q[1,1]": "0", "W_Q[2,2]": "0"},
        _entries("Q", "11", "22"),
    ),
    Slip(3, "lines of Q22 and Q32", {"W_Q[3,2]": "2"}, {"W_Q[3,2]": "0"}, _entries("Q", "32")),
    Slip(4, "Q", {"Q31": "2^(1/2)", "Q32": "-1/2"}, {"Q31": "5/2", "Q32": "-2"}, _results("Q31", "Q32")),
    Slip(
        5,
        "left factor of I W_K",
        {"shape": "3 x 2"},
        {"shape": "3 x 4"},
        lambda: {"shape": _shape(INPUT)},
    ),
    Slip(
        6,
        "lines of K (K31 also drops its third term)",
        {"W_K[2,1]": "-1/2", "W_K[4,2]": "-1/2", "W_K[4,1]": "-1", "K12": "-1", "K21": "-1", "K32": "3/2"},
        {"W_K[2,1]": "0", "W_K[4,2]": "1/2", "W_K[4,1]": "1", "K12": "-1/2", "K21": "2", "K32": "7/2"},
        lambda: _entries("K", "21", "42", "41")() | _results("K12", "K21", "K32")(),
    ),
    Slip(
        7,
        "K and K^T",
        {"K": "2 x 2", "K^T": "2 x 2"},
        {"K": "3 x 2", "K^T": "2 x 3"},
        lambda: {"K": _shape(K), "K^T": _shape(K.T)},
    ),
    Slip(
        8,
        "struck-out lines of Q K^T",
        {"entries covered": "3 x 2"},
        {"entries covered": "3 x 3"},
        lambda: {"entries covered": _shape(S)},
    ),
    Slip(9, "S", {"S[1,2]": "5/2"}, {"S[1,2]": "-5/2"}, lambda: {"S[1,2]": str(S[0, 1])}),
    Slip(
        10,
        "softmax",
        {"denominator of row 1": "e^1.5 + e^-3.5 + e^8.5"},
        {"denominator of row 1": "e^1.5 + e^-2.5 + e^8"},
        _column_denominator,
    ),
    Slip(
        11,
        "scores",
        {"scale": "1"},
        {"scale": "1/sqrt(2)"},
        lambda: {"scale": f"1/sqrt({K.cols})"},
    ),
    Slip(12, "line of V12", {"W_V[1,2]": "-1/2"}, {"W_V[1,2]": "1/2"}, _entries("V", "12")),
    Slip(13, "line of V21", {"W_V[4,1]": "-1/2"}, {"W_V[4,1]": "1/2"}, _entries("V", "41")),
    Slip(
        14,
        "lines of V32 and V12",
        {"W_V[1,2]": "-1/2", "W_V[3,2]": "1"},
        {"W_V[1,2]": "1/2", "W_V[3,2]": "2"},
        _entries("V", "12", "32"),
    ),
    Slip(15, "V", {"V12": "5/2", "V21": "-1/2"}, {"V12": "-3/2", "V21": "-1"}, _results("V12", "V21")),
    Slip(16, "output", {"Y31": "1.17", "Y32": "0.21"}, {"Y31": "1.18", "Y32": "0.20"}, _rounded_output),
    Slip(17, "a stray 0.21", {"outputs of 0.21": "1"}, {"outputs of 0.21": "0"}, _stray),
    Slip(18, "Q3c", {"who attends to whom": ""}, {"who attends to whom": "1 to 3, 2 to 3, 3 to 1"}, _argmax),
)
