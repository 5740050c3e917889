"""Numbers for the problems about generating text: caches, samplers, faults."""

from fractions import Fraction
from math import log, log2, log10
from typing import Any

from glassformer.theory.course.answers import Number, TrueFalse
from glassformer.theory.course.problem import Draw, Drawn


def cache_rows(draw: Draw) -> Drawn:
    t = draw.integer(8, 200)
    wrong = {"cached": t, "square": t * t, "before": t * (t - 1) // 2, "scores": t * (t + 1) * (2 * t + 1) // 6,
             "half": Fraction(t * t, 2)}  # fmt: skip
    return Drawn(Number(t * (t + 1) // 2), {"t": t}, wrong)


def cache_is_valid(mask: list[list[int]], layers: int) -> bool:
    """Return whether keys and values that are stored once stay right, for a model of one or two layers.

    Token t reads stored s < t. With two layers the state of s must not change after it was stored: s may see no token
    that comes after it and not after t.
    """
    n = len(mask)
    return layers == 1 or not any(
        mask[t][s] and any(mask[s][u] for u in range(s + 1, t + 1)) for t in range(n) for s in range(t)
    )


def cache_mask(draw: Draw) -> Drawn:
    layers, n = draw.integer(1, 2), draw.integer(3, 4)

    def refute(rows: list[list[Any]]) -> str:
        if len(rows) != n or len(rows[0]) != n or any(x not in (0, 1) for row in rows for x in row):
            return f"give {n} rows of {n} zeros and ones."
        mask = [[int(x) for x in row] for row in rows]
        if not all(mask[i][i] for i in range(n)):
            return "each token must see itself."
        if not any(mask[i][j] for i in range(n) for j in range(i + 1, n)):
            return "this mask is causal: no token sees a later one."
        if not cache_is_valid(mask, layers):
            return "a stored state that a later token reads would have changed."
        return ""

    def written(mask: list[list[int]]) -> str:
        return "; ".join(" ".join(map(str, row)) for row in mask)

    alone = [[int(i == j) for j in range(n)] for i in range(n)]
    alone[0][1] = 1
    causal = [[int(j <= i) for j in range(n)] for i in range(n)]
    answer = TrueFalse(False, refute, written(alone), f"{n} rows of 0 and 1")
    wrong = {"believed": "true", "causal": f"false: {written(causal)}"}
    if layers == 2:
        wrong["full"] = f"false: {written([[1] * n] * n)}"
    return Drawn(answer, {"layers": "one layer" if layers == 1 else "two layers", "n": n}, wrong)


def leak_bound(draw: Draw) -> Drawn:
    v = draw.integer(8, 500)
    wrong = {"zero": 0, "bits": log2(v), "probability": Fraction(1, v), "pairs": 2 * log(v), "decimal": log10(v),
             "one": 1}  # fmt: skip
    return Drawn(Number(log(v), 2e-3), {"v": v}, wrong)


def nucleus_share(draw: Draw) -> Drawn:
    parts = sorted(draw.sample(range(1, 12), 4), reverse=True)
    total = sum(parts)
    probabilities = [Fraction(part, total) for part in parts]
    kept = draw.integer(2, 3)
    below, reached = sum(probabilities[: kept - 1]), sum(probabilities[:kept])
    p = round(float(below + reached) / 2, 2)
    if not below < p < reached:
        return nucleus_share(draw)
    wrong = {
        "crossing": probabilities[0] / below,
        "unnormalised": probabilities[0],
        "more": probabilities[0] / (reached + probabilities[kept]),
        "threshold": float(probabilities[0]) / p,
    }
    values = {"parts": parts, "total": total, "p": p, "kept": kept, "first": parts[0], "sum": sum(parts[:kept])}
    return Drawn(Number(probabilities[0] / reached, 2e-3), values, wrong)


def temperature_odds(draw: Draw) -> Drawn:
    root = draw.integer(2, 9)
    tau = draw.choice([Fraction(1, 2), Fraction(2)])
    a = root * root if tau == 2 else root
    odds, other = (root, root**4) if tau == 2 else (root * root, 0)

    def share(x: float | Fraction) -> Fraction:
        return Fraction(x) / (1 + Fraction(x))

    wrong = {"plain": share(a), "linear": share(Fraction(a) / tau), "second": 1 - share(odds), "odds": odds}
    wrong["times"] = share(other) if other else Fraction(root**0.5) / (1 + Fraction(root**0.5))
    return Drawn(Number(share(odds), 1e-3), {"a": a, "tau": tau, "odds": odds}, wrong)
