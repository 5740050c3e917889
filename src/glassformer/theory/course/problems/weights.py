"""Numbers for the problems about attention weights and scores."""

from fractions import Fraction
from math import exp, log, sqrt
from typing import Any

from glassformer.theory.course.answers import Formula, Matrix, Number, TrueFalse
from glassformer.theory.course.problem import Draw, Drawn


def weights_bound(draw: Draw) -> Drawn:
    n, total, signed = draw.integer(2, 4), draw.integer(1, 3), draw.choice([True, False])

    def refute(rows: list[list[Any]]) -> str:
        if len(rows) != 1 or len(rows[0]) != n:
            return f"give {n} numbers in one row."
        if abs(sum(rows[0]) - total) > 1e-9:
            return f"the numbers add up to {float(sum(rows[0])):.6g}, not {total}."
        if not signed and min(rows[0]) < 0:
            return "a number is negative, which the condition excludes."
        return "" if max(rows[0]) > total + 1e-9 else f"no number exceeds {total}."

    beyond = ", ".join(map(str, [total + 1, -1, *[0] * (n - 2)]))
    within = ", ".join(map(str, [total, *[0] * (n - 1)]))
    answer = TrueFalse(not signed, refute, beyond, f"{n} numbers")
    condition = "real numbers" if signed else "numbers, none of them negative,"
    wrong = {"believed": "true", "within": f"false: {within}"} if signed else {"negative": f"false: {beyond}"}
    return Drawn(answer, {"n": n, "total": total, "condition": condition}, wrong)


def _fraction_scores(draw: Draw) -> tuple[int, int, int]:
    a, b, c = draw.sample(range(2, 12), 3)
    return a, b, c


def softmax_fraction(draw: Draw) -> Drawn:
    a, b, c = _fraction_scores(draw)
    wrong = {
        "linear": log(a) / (log(a) + log(b) + log(c)),
        "alone": Fraction(a, a + 1),
        "unnormalised": a,
        "others": Fraction(a, b + c),
        "second": Fraction(b, a + b + c),
        "plain": Fraction(1, 3),
    }
    return Drawn(Number(Fraction(a, a + b + c)), {"a": a, "b": b, "c": c}, wrong)


def softmax_shift(draw: Draw) -> Drawn:
    a, b = draw.sample(range(2, 12), 2)
    c = draw.integer(1, 3)
    wrong = {"one": a * exp(c) / (a * exp(c) + b), "times": a / (a + b) * exp(c), "log": log(a) / (log(a) + log(b)),
             "second": Fraction(b, a + b)}  # fmt: skip
    return Drawn(Number(Fraction(a, a + b)), {"a": a, "b": b, "c": c}, wrong)


def self_weight(draw: Draw) -> Drawn:
    n, c = draw.integer(5, 30), draw.integer(2, 4)
    wrong = {
        "uniform": Fraction(1, n),
        "linear": Fraction(c, c + n - 1),
        "one": 1,
        "count": exp(c) / (exp(c) + n),
        "norm": exp(sqrt(c)) / (exp(sqrt(c)) + n - 1),
        "another": 1 / (exp(c) + n - 1),
        "unit": exp(1) / (exp(1) + n - 1),
    }
    return Drawn(Number(exp(c) / (exp(c) + n - 1), 2e-3), {"n": n, "c": c, "m": n - 1}, wrong)


def orthogonal_distance(draw: Draw) -> Drawn:
    s = draw.integer(2, 6)
    answer = Formula(f"sqrt(N*(N-1))/(exp(C/{s})+N-1)", {"N": "whole", "C": "positive"})
    wrong = {
        "zero": "0",
        "own": f"(N-1)/(exp(C/{s})+N-1)",
        "others": f"sqrt(N-1)/(exp(C/{s})+N-1)",
        "unscaled": "sqrt(N*(N-1))/(exp(C)+N-1)",
        "square": f"N*(N-1)/(exp(C/{s})+N-1)^2",
        "count": f"sqrt(N*(N-1))/(exp(C/{s})+N)",
    }
    return Drawn(answer, {"s": s}, wrong)


def orthogonal_fixed(draw: Draw) -> Drawn:
    n = draw.integer(2, 3)

    def refute(rows: list[list[Any]]) -> str:
        if len(rows) != n:
            return f"give {n} vectors, one in each row."
        if any(all(x == 0 for x in row) for row in rows):
            return "a vector is zero, which the condition excludes."
        for i in range(n):
            for j in range(i):
                if abs(sum(x * y for x, y in zip(rows[i], rows[j], strict=True))) > 1e-9:
                    return f"vectors {j + 1} and {i + 1} are not orthogonal."
        return ""  # y = x needs a weight of exactly 1, which no softmax over several finite scores gives

    identity = "; ".join(" ".join("1" if i == j else "0" for j in range(n)) for i in range(n))
    slanted = "; ".join(" ".join("1" if j <= i else "0" for j in range(n)) for i in range(n))
    answer = TrueFalse(False, refute, identity, f"{n} vectors, one in each row")
    return Drawn(answer, {"n": n}, {"believed": "true", "slanted": f"false: {slanted}"})


def dot_variance(draw: Draw) -> Drawn:
    d, p, q = draw.integer(6, 60), draw.integer(2, 5), draw.integer(2, 5)
    wrong = {"squared": d * d * p * q, "added": d * (p + q), "deviation": sqrt(d * p * q), "one": p * q,
             "unit": d}  # fmt: skip
    return Drawn(Number(d * p * q), {"d": d, "p": p, "q": q}, wrong)


def unit_scale(draw: Draw) -> Drawn:
    d, p, q = draw.choice([16, 32, 48, 64, 96, 128]), draw.integer(2, 5), draw.integer(2, 5)
    v = d * p * q
    wrong = {"whole": Fraction(1, v), "inverse": sqrt(v), "width": 1 / sqrt(d), "sum": 1 / sqrt(d * (p + q)),
             "unrooted": Fraction(1, d), "one": 1 / sqrt(p * q)}  # fmt: skip
    return Drawn(Number(1 / sqrt(v)), {"d": d, "p": p, "q": q, "v": v}, wrong)


def attention_output(draw: Draw) -> Drawn:
    a, b, c = _fraction_scores(draw)
    v = draw.matrix(3, 2, -5, 5)

    def mixed(*w: int) -> list[list[Any]]:
        return [[Fraction(sum(x * row[j] for x, row in zip(w, v, strict=True)), sum(w)) for j in range(2)]]

    largest = v[(a, b, c).index(max(a, b, c))]
    wrong = {
        "uniform": mixed(1, 1, 1),
        "others": mixed(0, b, c),
        "argmax": [largest],
        "sum": [[x * (a + b + c) for x in mixed(a, b, c)[0]]],
        "linear": [
            [sum(log(x) * row[j] for x, row in zip((a, b, c), v, strict=True)) / log(a * b * c) for j in range(2)]
        ],
    }
    return Drawn(Matrix(mixed(a, b, c)), {"a": a, "b": b, "c": c, "v": v, "total": a + b + c}, wrong)


def scaled_weight(draw: Draw) -> Drawn:
    m, s, t = draw.integer(2, 5), draw.integer(1, 9), draw.integer(-6, 0)
    gap = s - t

    def first(x: float) -> float:
        return 1 / (1 + exp(-x))

    wrong = {
        "twice": first(gap / m**2),
        "none": first(gap),
        "times": first(gap * m),
        "second": first(-gap / m),
        "equal": 0.5,
    }
    values = {"m": m, "width": m * m, "s": s, "t": t, "gap": gap}
    return Drawn(Number(first(gap / m), 1e-3), values, wrong)
