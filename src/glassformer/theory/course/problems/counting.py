"""Numbers for the problems about counting parameters and budgets."""

from fractions import Fraction
from math import ceil, floor, log, log10, sqrt

from glassformer.theory.course.answers import Number
from glassformer.theory.course.problem import Draw, Drawn


def _width(draw: Draw) -> int:
    return draw.choice([128, 192, 256, 320, 384, 512, 640, 768, 1024])


def _layer(d: int, f: int) -> int:
    return 4 * d * d + 4 * d + 2 * d * f + d + f + 4 * d


def block_count(draw: Draw) -> Drawn:
    d, times, h = _width(draw), draw.integer(2, 5), draw.choice([4, 8])
    f = times * d
    weights = 4 * d * d + 2 * d * f
    wrong = {
        "weights": weights,
        "norms": _layer(d, f) - 4 * d,
        "heads": 4 * h * d * d + 2 * d * f + 9 * d + f,
        "one_norm": _layer(d, f) - 2 * d,
        "output": _layer(d, f) - d * d - d,
        "biases": weights + 4 * d,
    }
    return Drawn(Number(_layer(d, f)), {"d": d, "f": f, "h": h, "weights": weights, "rest": 9 * d + f}, wrong)


def expert_share(draw: Draw) -> Drawn:
    e = draw.choice([4, 8, 16, 32, 64])
    k = draw.choice([1, 2])
    wrong = {"active": Fraction(2 * k, 2 * k + 1), "equal": Fraction(e, e + 1), "dense": Fraction(2, 3)}
    if k == 1:
        del wrong["active"]  # with one active expert it is the share of a dense layer
    return Drawn(Number(Fraction(2 * e, 2 * e + 1), 1e-3), {"e": e, "k": k, "twice": 2 * e}, wrong)


def decoder_count(draw: Draw) -> Drawn:
    v, d, layers = draw.integer(5000, 60000), _width(draw), draw.integer(4, 24)
    context = draw.choice([256, 512, 1024, 2048])
    total = v * d + context * d + layers * _layer(d, 4 * d) + 2 * d
    wrong = {
        "untied": total + v * d,
        "rough": v * d + 12 * layers * d * d,
        "positions": total - context * d,
        "final": total - 2 * d,
        "biases": total - 9 * d * layers,
        "norms": total - 4 * d * layers,
    }
    values = {"v": v, "d": d, "layers": layers, "context": context, "f": 4 * d, "layer": _layer(d, 4 * d)}
    return Drawn(Number(total), values, wrong)


def tying_saving(draw: Draw) -> Drawn:
    v, d = draw.integer(1000, 60000), _width(draw)
    total = 2 * v * d + draw.integer(10**6, 10**8)
    wrong = {"saving": v * d, "both": total - 2 * v * d, "vocabulary": total - v, "unchanged": total}
    return Drawn(Number(total - v * d), {"v": v, "d": d, "total": total, "saved": v * d}, wrong)


def encoder_count(draw: Draw) -> Drawn:
    v, d, layers = draw.integer(5000, 60000), _width(draw), draw.integer(6, 24)
    context = draw.choice([128, 256, 512])
    blocks = layers * _layer(d, 4 * d)
    total = v * d + context * d + 2 * d + 2 * d + blocks
    wrong = {
        "sinusoidal": total - context * d - 2 * d,
        "norm": total - 2 * d,
        "pooler": total + d * d + d,
        "blocks": blocks,
    }
    values = {"v": v, "d": d, "layers": layers, "context": context, "f": 4 * d, "blocks": blocks}
    return Drawn(Number(total), values, wrong)


def compute_budget(draw: Draw) -> Drawn:
    billions = draw.integer(2, 400)
    n = billions * 10**9
    mantissa = Fraction(120 * n * n, 10 ** (len(str(120 * n * n)) - 1))
    values = {"mantissa": float(mantissa), "power": len(str(120 * n * n)) - 1, "tokens": 20 * billions}
    budget = 120 * n * n
    wrong = {"tokens": 20 * float(n), "six": sqrt(budget / 6), "twenty": sqrt(budget / 20), "root": float(budget) / 120}
    return Drawn(Number(float(n)), values, wrong)


def projection_width(draw: Draw) -> Drawn:
    power, eps = draw.integer(4, 12), draw.choice([Fraction(1, 20), Fraction(1, 10), Fraction(1, 5), Fraction(3, 10)])
    exact = 8 * power * log(10) / float(eps) ** 2
    wrong = {
        "down": floor(exact),
        "decimal": ceil(8 * log10(10**power) / float(eps) ** 2),
        "once": ceil(8 * power * log(10) / float(eps)),
    }
    return Drawn(Number(ceil(exact)), {"power": power, "eps": float(eps), "exact": exact}, wrong)
