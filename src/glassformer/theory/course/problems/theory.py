"""Numbers for the problems about rank, gradient steps and collapse."""

from fractions import Fraction
from math import log, log10
from typing import Any

from glassformer.theory.course.answers import Formula, Number, TrueFalse
from glassformer.theory.course.problem import Draw, Drawn


def rank_claim(draw: Draw) -> Drawn:
    linear = draw.choice([True, False])

    def refute(rows: list[list[Any]]) -> str:
        if len(rows) != 2 or len(rows[0]) != 2:
            return "give two rows of two numbers: the queries, then the keys."
        if linear:
            return "the product of a column and a row has rank 1."
        (q1, q2), (k1, k2) = rows
        if q1 == q2:
            return "equal queries give equal rows of weights, so the rank is 1."
        return "" if k1 != k2 else "equal keys give uniform weights in both rows, so the rank is 1."

    answer = TrueFalse(linear, refute, "0 1; 0 1", "q1 q2; k1 k2")
    kind = "linear attention $Z = (Q K^\\top) V$" if linear else "softmax attention $Z = \\text{softmax}(Q K^\\top) V$"
    wrong = {"softmax": "false: 0 1; 0 1"} if linear else {"believed": "true", "equal": "false: 1 1; 0 1"}
    return Drawn(answer, {"kind": kind}, wrong)


def head_rank(draw: Draw) -> Drawn:
    n, h, k, u = draw.integer(10, 60), draw.integer(2, 6), draw.integer(2, 8), draw.integer(2, 8)
    d = draw.integer(10, 60)
    wrong = {"keys": min(n, h * min(k, u), d), "one": min(n, u, d), "sequence": n}
    return Drawn(Number(min(n, h * u, d)), {"n": n, "h": h, "k": k, "u": u, "d": d, "total": h * u}, wrong)


def gradient_prediction(draw: Draw) -> Drawn:
    x, y, query = draw.matrix(3, 2), draw.vector(3), draw.vector(2)
    eta = draw.choice([Fraction(1, 2), Fraction(1, 4), Fraction(1, 10), Fraction(2)])
    attention = sum(sum(a * b for a, b in zip(query, row, strict=True)) * t for row, t in zip(x, y, strict=True))
    wrong = {"rate": attention, "sign": -eta * attention, "mean": eta * attention / 3}
    return Drawn(
        Number(eta * attention, 1e-6), {"x": x, "y": y, "query": query, "eta": eta, "attention": attention}, wrong
    )


def matching_rate(draw: Draw) -> Drawn:
    k = draw.choice([1, 3, 4, 5, 6, 8])
    answer = Formula(f"{k}*n/2", {"n": "whole"})
    return Drawn(answer, {"k": k}, {"one": "1", "half": f"{k}*n", "inverse": f"2/({k}*n)", "count": f"{k}/2"})


def kernel_mean(draw: Draw) -> Drawn:
    w, y = [draw.integer(1, 9) for _ in range(3)], draw.vector(3, -6, 6)
    weighted = sum(a * b for a, b in zip(w, y, strict=True))
    wrong = {"unnormalised": weighted, "plain": Fraction(sum(y), 3), "third": Fraction(weighted, 3)}
    return Drawn(Number(Fraction(weighted, sum(w)), 1e-3), {"w": w, "y": y, "total": sum(w), "sum": weighted}, wrong)


def collapse_rate(draw: Draw) -> Drawn:
    percent, layers, squared = draw.choice([1, 5, 10, 20, 30]), draw.integer(4, 48), draw.choice([True, False])
    exponent = log(100 / percent)
    rate = exponent / (2 * layers if squared else layers)
    wrong = {"other": exponent / (layers if squared else 2 * layers), "decimal": rate * log10(2.718281828459045),
             "lost": log(100 / (100 - percent)) / (2 * layers if squared else layers), "layers": exponent}  # fmt: skip
    what = "variance (squared norm)" if squared else "norm"
    divisor = 2 * layers if squared else layers
    return Drawn(Number(rate), {"percent": percent, "layers": layers, "what": what, "divisor": divisor}, wrong)


def cubic_collapse(draw: Draw) -> Drawn:
    start, steps = draw.integer(2, 6), draw.integer(2, 4)
    wrong = {"linear": start * (steps + 1), "double": start * 2**steps, "times": start * 3 * steps}
    return Drawn(Number(start * 3**steps), {"start": start, "steps": steps}, wrong)


def rescaled_norm(draw: Draw) -> Drawn:
    a, b, c = draw.integer(2, 20), draw.integer(2, 20), draw.integer(2, 5)
    wrong = {"same": a + b, "first": Fraction(a * c) + Fraction(b, c), "both": c * c * (a + b),
             "swapped": Fraction(a, c * c) + Fraction(b * c * c)}  # fmt: skip
    return Drawn(Number(Fraction(a * c * c) + Fraction(b, c * c), 1e-3), {"a": a, "b": b, "c": c}, wrong)


def fourier_margin(draw: Draw) -> Drawn:
    p = draw.choice(
        [5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 113]
    )
    wrong = {"largest": Fraction(p - 1, 2), "twice": p, "difference": Fraction(p - 2, 2)}
    return Drawn(Number(Fraction(p, 2), 1e-6), {"p": p, "half": (p - 1) // 2}, wrong)
