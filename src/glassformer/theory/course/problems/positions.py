"""Numbers for the problems about positions."""

from fractions import Fraction
from math import cos, pi, radians, sin
from typing import Any

from glassformer.theory.course.answers import Matrix, Number, TrueFalse
from glassformer.theory.course.problem import Draw, Drawn


def _apply(matrix: list[list[int]], vector: list[int]) -> list[int]:
    return [sum(w * x for w, x in zip(row, vector, strict=True)) for row in matrix]


def concat_split(draw: Draw) -> Drawn:
    w, x, e = draw.matrix(2, 4), draw.vector(2), draw.vector(2)
    left = [row[:2] for row in w]
    added = [a + b for a, b in zip(x, e, strict=True)]
    wrong = {"added": [_apply(left, added)], "swapped": [_apply(w, [*e, *x])], "content": [_apply(left, x)]}
    return Drawn(Matrix([_apply(w, [*x, *e])]), {"w": w, "x": x, "e": e}, wrong)


def concat_add(draw: Draw) -> Drawn:
    e, invertible = draw.integer(1, 9), draw.choice([True, False])

    def refute(rows: list[list[Any]]) -> str:
        if len(rows) != 1 or len(rows[0]) != 2:
            return "give two numbers, a and b."
        a, b = rows[0]
        if invertible and a == 0:
            return "a is 0, which the condition excludes."
        if a == 0 and b != 0:
            return ""
        return f"w = {float(a):g} and e' = {float(b * e / a) if a else 0:g} give the same function."

    answer = TrueFalse(invertible, refute, "0, 1", "a, b")
    wrong = {"zero": "false: 0, 1"} if invertible else {"believed": "true", "negative": "false: 1, -1"}
    return Drawn(answer, {"e": e, "condition": "$a \\ne 0$ and " if invertible else ""}, wrong)


def shift_matrix(draw: Draw) -> Drawn:
    k, tenths = draw.integer(2, 6), draw.integer(1, 4)
    omega = Fraction(tenths, 10)
    angle = float(k * omega)
    c, s = cos(angle), sin(angle)
    wrong = {
        "transposed": [[c, -s], [s, c]],
        "frequency": [[cos(k), sin(k)], [-sin(k), cos(k)]],
        "swapped": [[s, c], [c, -s]],
        "degrees": [[cos(radians(angle)), sin(radians(angle))], [-sin(radians(angle)), cos(radians(angle))]],
        "step": [[cos(omega), sin(omega)], [-sin(omega), cos(omega)]],
    }
    return Drawn(Matrix([[c, s], [-s, c]]), {"k": k, "omega": float(omega)}, wrong)


def sine_only(draw: Draw) -> Drawn:
    omega = draw.integer(2, 14) / 10
    ratio = sin(2 * omega) / sin(omega)
    wrong = {"constant": 1 / ratio, "next": sin(3 * omega) / sin(2 * omega), "double": 2}
    values = {"omega": omega, "third": sin(3 * omega) / sin(2 * omega)}
    return Drawn(Number(ratio), values, wrong)


def relative_score(draw: Draw) -> Drawn:
    p, q = draw.sample(range(1, 30), 2)
    value = cos(p - q) + cos((p - q) / 10)
    wrong = {"sum": cos(p + q) + cos((p + q) / 10), "first": cos(p - q), "sine": sin(p - q) + sin((p - q) / 10),
             "degrees": cos(radians(p - q)) + cos(radians((p - q) / 10)),
             "product": cos(p - q) * cos((p - q) / 10)}  # fmt: skip
    return Drawn(Number(value, 1e-2), {"p": p, "q": q, "gap": p - q}, wrong)


def frequency_period(draw: Draw) -> Drawn:
    d, base = draw.choice([16, 32, 64, 128]), draw.choice([100, 1000, 10000])
    i = draw.integer(1, d // 2 - 1)
    period = 2 * pi * base ** (2 * i / d)
    wrong = {"half": 2 * pi * base ** (i / d), "frequency": base ** (-2 * i / d), "turn": base ** (2 * i / d),
             "degrees": 360 * base ** (2 * i / d), "previous": 2 * pi * base ** (2 * (i - 1) / d),
             "next": 2 * pi * base ** (2 * (i + 1) / d)}  # fmt: skip
    return Drawn(Number(period), {"d": d, "base": base, "i": i}, wrong)


def rope_score(draw: Draw) -> Drawn:
    q, k = draw.vector(2, -4, 4), draw.vector(2, -4, 4)
    m, n = draw.sample(range(0, 8), 2)

    def score(turns: int, angle: float = pi / 6) -> float:
        c, s = cos(turns * angle), sin(turns * angle)
        return q[0] * (c * k[0] - s * k[1]) + q[1] * (s * k[0] + c * k[1])

    wrong = {
        "sign": score(m - n),
        "sum": score(m + n),
        "plain": score(0),
        "radians": score(n - m, 30),
        "query": score(-m),
    }
    return Drawn(Number(score(n - m)), {"q": q, "k": k, "m": m, "n": n, "turns": n - m}, wrong)
