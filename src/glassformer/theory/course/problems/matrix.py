"""Numbers for the problems about attention as a matrix, permutations and high dimensions."""

from fractions import Fraction
from math import acos, degrees, sqrt
from typing import Any

from glassformer.theory.course.answers import Matrix, Number, TrueFalse
from glassformer.theory.course.problem import Draw, Drawn


def kronecker_block(draw: Draw) -> Drawn:
    a = [[Fraction(p, 10), Fraction(10 - p, 10)] for p in draw.sample(range(1, 10), 2)]
    w = draw.matrix(2, 2)
    n, m = draw.choice([(0, 1), (1, 0)])

    def block(factor: Fraction, transposed: bool) -> list[list[Fraction]]:
        return [[factor * (w[j][i] if transposed else w[i][j]) for j in range(2)] for i in range(2)]

    wrong = {"untransposed": block(a[n][m], False), "other": block(a[m][n], True), "bare": block(Fraction(1), True)}
    values = {"a": a, "w": w, "n": n + 1, "m": m + 1, "weight": a[n][m]}
    return Drawn(Matrix(block(a[n][m], True), 1e-9, 1e-9), values, wrong)


def kronecker_rank(draw: Draw) -> Drawn:
    n, d = draw.integer(4, 9), draw.integer(4, 9)
    a, r = draw.integer(2, n), draw.integer(2, d - 1)
    wrong = {"smaller": min(a, r), "sum": a + r, "full": n * d}
    return Drawn(Number(a * r), {"n": n, "d": d, "a": a, "r": r}, wrong)


def dense_ratio(draw: Draw) -> Drawn:
    n, d, output = draw.integer(5, 200), draw.choice([64, 128, 256, 512]), draw.choice([True, False])
    k, other = (4, 3) if output else (3, 4)
    values = {"n": n, "d": d, "k": k, "which": "with" if output else "without"}
    wrong = {
        "linear": Fraction(n, k),
        "output": Fraction(n * n, other),
        "squared": n * n,
        "width": Fraction(n * n * d, k),
    }
    return Drawn(Number(Fraction(n * n, k), 1e-3), values, wrong)


def permuted_weights(draw: Draw) -> Drawn:
    a: list[list[Fraction]] = []
    for _ in range(3):
        p, q = sorted(draw.sample(range(1, 10), 2))
        a.append([Fraction(p, 10), Fraction(q - p, 10), Fraction(10 - q, 10)])
    sigma = draw.choice([(1, 2, 0), (2, 0, 1)])
    inverse = [sigma.index(i) for i in range(3)]

    def moved(rows: Any, columns: Any) -> list[list[Fraction]]:
        return [[a[i][j] for j in columns] for i in rows]

    wrong = {"rows": moved(sigma, range(3)), "inverse": moved(inverse, inverse), "unchanged": a,
             "columns": moved(range(3), sigma)}  # fmt: skip
    values = {"a": a, "sigma": [s + 1 for s in sigma], "first": sigma[0] + 1}
    return Drawn(Matrix(moved(sigma, sigma), 1e-9, 1e-9), values, wrong)


def causal_position(draw: Draw) -> Drawn:
    t = draw.integer(4, 40)
    wrong = {"shifted": Fraction(1, t), "rest": Fraction(t, t + 1), "none": 0}
    return Drawn(Number(Fraction(1, t + 1), 2e-3), {"t": t, "seen": t + 1}, wrong)


def cosine_deviation(draw: Draw) -> Drawn:
    d = draw.integer(5, 900)
    wrong = {"variance": Fraction(1, d), "one": 1, "two": sqrt(2 / d), "inverse": sqrt(d),
             "degree": degrees(1 / sqrt(d))}  # fmt: skip
    return Drawn(Number(1 / sqrt(d)), {"d": d}, wrong)


def symmetric_enough(draw: Draw) -> Drawn:
    d = draw.integer(2, 3)

    def refute(rows: list[list[Any]]) -> str:
        if len(rows[0]) != d:
            return f"give vectors with {d} components."
        if any(abs(sum(x * x for x in row) - 1) > 1e-6 for row in rows):
            return "a vector does not have length 1."
        found = [[round(float(x), 9) + 0.0 for x in row] for row in rows]
        if any([0.0 - x + 0.0 for x in row] not in found for row in found):
            return "the set is not symmetric: with every vector its negative must be in it."
        pairs = [sum(x * y for x, y in zip(p, q, strict=True)) ** 2 for p in rows for q in rows]
        mean = sum(pairs) / len(pairs)
        return "" if abs(mean - Fraction(1, d)) > 1e-6 else f"the mean of cos² is 1/{d} for this set."

    zeros = ["0"] * (d - 1)
    axis = " ".join(["1", *zeros]) + "; " + " ".join(["-1", *zeros])
    axes = "; ".join(" ".join(s if i == j else "0" for j in range(d)) for i in range(d) for s in ("1", "-1"))
    answer = TrueFalse(False, refute, axis, "vectors, one in each row")
    return Drawn(answer, {"d": d}, {"believed": "true", "isotropic": f"false: {axes}"})


def deviation_angle(draw: Draw) -> Drawn:
    d = draw.integer(6, 120)
    angle = degrees(acos(1 / sqrt(d)))
    wrong = {"radians": acos(1 / sqrt(d)), "complement": 90 - angle, "variance": degrees(acos(1 / d)), "right": 90}
    return Drawn(Number(angle, 2e-3), {"d": d}, wrong)
