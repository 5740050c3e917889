"""Numbers for the problems about blocks, masks and whole models."""

from fractions import Fraction
from math import sqrt

from glassformer.theory.course.answers import Matrix, Number
from glassformer.theory.course.problem import Draw, Drawn


def residual_write(draw: Draw) -> Drawn:
    states = [draw.vector(3, -5, 5) for _ in range(4)]
    k = draw.integer(2, 3)

    def difference(a: int, b: int) -> list[list[int]]:
        return [[x - y for x, y in zip(states[a], states[b], strict=True)]]

    wrong = {"state": [states[k]], "start": difference(k, 0), "sign": difference(k - 1, k)}
    values = {f"x{n}": state for n, state in enumerate(states)}
    return Drawn(Matrix(difference(k, k - 1)), {**values, "k": k, "before": k - 1}, wrong)


def late_gradient(draw: Draw) -> Drawn:
    layers, v = (
        draw.choice([6, 12, 24, 48, 96]),
        draw.choice([Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2)]),
    )
    total = float(1 + 2 * layers * v)
    wrong = {"undistorted": 1, "variance": 1 / total, "blocks": 1 / sqrt(1 + layers * v), "growth": sqrt(total)}
    return Drawn(Number(1 / sqrt(total)), {"layers": layers, "v": v, "total": total, "count": 2 * layers}, wrong)


def dependency_count(draw: Draw) -> Drawn:
    n, m, kind = draw.integer(4, 20), draw.integer(4, 20), draw.choice(["encoder", "decoder", "both"])
    texts = {
        "encoder": f"an encoder-only model reads ${n}$ tokens",
        "decoder": f"a decoder-only model reads ${n}$ tokens",
        "both": f"an encoder-decoder model reads ${n}$ source tokens, and its decoder ${m}$ target tokens",
    }
    half = n * (n + 1) // 2
    match kind:
        case "encoder":
            answer, wrong = n * n, {"causal": half, "itself": n * (n - 1)}
        case "decoder":
            answer, wrong = half, {"full": n * n, "strict": n * (n - 1) // 2}
        case _:
            answer = m * n + m * (m + 1) // 2
            wrong = {"cross": m * (m + 1) // 2, "full": m * n + m * m, "strict": m * n + m * (m - 1) // 2}
    return Drawn(Number(answer), {"setting": texts[kind]}, wrong)


def supervised_ratio(draw: Draw) -> Drawn:
    t, percent = draw.integer(8, 20), draw.choice([10, 15, 20])
    share = Fraction(percent, 100)
    answer = Fraction(t - 1) / (share * t)
    wrong = {"all": 1 / share, "inverse": 1 / answer, "equal": 1, "less": (t - 1) * share}
    return Drawn(Number(answer), {"t": t, "percent": percent, "less": t - 1, "masked": float(share * t)}, wrong)


def unmasked_positions(draw: Draw) -> Drawn:
    layers, n = draw.integer(1, 4), draw.integer(3, 40)
    answer = 1 if layers == 1 else 0
    wrong = {"all": n, "first": n - 1} | ({"none": 0} if layers == 1 else {"last": 1})
    which = "one layer" if layers == 1 else f"{layers} layers"
    return Drawn(Number(answer), {"which": which, "n": n}, wrong)


def logits_count(draw: Draw) -> Drawn:
    b, t, v, d = draw.integer(2, 9), draw.integer(5, 60), draw.integer(100, 999), draw.choice([32, 64, 128])
    wrong = {"last": b * v, "width": b * t * d, "single": t * v, "shifted": b * (t - 1) * v}
    return Drawn(Number(b * t * v), {"b": b, "t": t, "v": v, "d": d}, wrong)
