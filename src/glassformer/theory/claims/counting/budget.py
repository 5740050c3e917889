"""Two budgets: how to spend training compute on parameters and tokens, how many dimensions keep distances."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import mpmath
import numpy as np
import sympy as sp

from glassformer.finding import Finding
from glassformer.lens.figure import GREY, Figure
from glassformer.sizing import CORRECTED, PUBLISHED, LossFit, chinchilla, johnson_lindenstrauss
from glassformer.sizing.johnson_lindenstrauss import log_union_bound
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import UNIT, half_units

BUDGET = 12 * 10**23
"""C = 1.2e24 operations."""
POINTS, EPS = 10**12, 0.1


def golden_minimum(f: Callable[[float], float], low: float, high: float) -> float:
    """Where f, falling then rising on [low, high], is least: each step keeps 0.618 of the interval."""
    shrink = (math.sqrt(5) - 1) / 2
    a, b = low, high
    x, y = b - shrink * (b - a), a + shrink * (b - a)
    fx, fy = f(x), f(y)
    for _ in range(120):
        if fx <= fy:
            b, y, fy = y, x, fx
            x = b - shrink * (b - a)
            fx = f(x)
        else:
            a, x, fx = x, y, fy
            y = a + shrink * (b - a)
            fy = f(y)
    return (a + b) / 2


@claim("chinchilla-allocation")
def chinchilla_allocation(lab: Lab) -> Iterator[Finding]:
    per = 1 if lab.broken else 6  # operations per parameter and token
    N = math.isqrt(BUDGET // (20 * per))
    yield lab.exact(
        "C = 6ND and D = 20N in whole numbers", N == 10**11 and per * N * 20 * N == BUDGET, parameters=N, tokens=20 * N
    )
    rule = chinchilla(flops=float(BUDGET)).allocations[0]
    yield lab.numerical(
        "the size sheet's answer",
        max(abs(rule.parameters / 1e11 - 1), abs(rule.tokens / 2e12 - 1), abs(rule.flops / 1.2e24 - 1)),
        4 * UNIT,
        parameters=rule.parameters,
        tokens=rule.tokens,
    )
    yield lab.exact("the closed form is stationary", _stationary(per))
    stated = {
        PUBLISHED.source: ("4.48e10", "4.46e12", "99"),
        CORRECTED.source: ("1.05e11", "1.90e12", "18"),
    }
    for fit in (PUBLISHED, CORRECTED):
        best = fit.optimum(float(BUDGET))
        sought = golden_search(fit, BUDGET / per)
        yield lab.numerical(
            f"golden section, {fit.source}",
            abs(sought / best.parameters - 1),
            1e-6,
            parameters=best.parameters,
            tokens=best.tokens,
            ratio=best.ratio,
        )
        values = (best.parameters, best.tokens, best.ratio)
        yield lab.numerical(
            f"the numbers, {fit.source}",
            max(half_units(value, text) for value, text in zip(values, stated[fit.source], strict=True)),
            1,
            stated=stated[fit.source],
        )
        more = fit.optimum(100.0 * BUDGET)
        slope = math.log(more.parameters / best.parameters) / math.log(100)
        yield lab.numerical(
            f"N grows as C^(b/(a+b)), {fit.source}",
            abs(slope - fit.beta / (fit.alpha + fit.beta)),
            1e-12,
            exponent=slope,
        )


def golden_search(fit: LossFit, product: float) -> float:
    """N of least loss with N·D = product, searched over ln N; the constant E moves nothing and would cost digits."""
    bare = dataclasses.replace(fit, E=0.0)
    return math.exp(golden_minimum(lambda x: bare.loss(math.exp(x), product / math.exp(x)), 2.0, 60.0))


def _stationary(per: int) -> bool:
    """d/dN of A N^-a + B (6N/C)^b vanishes at the closed form, symbolically."""
    A, B, a, b, C, N = sp.symbols("A B a b C N", positive=True)
    G = (a * A / (b * B)) ** (1 / (a + b))
    best = G * (C / 6) ** (b / (a + b))
    # the derivative is zero where a A N^-a = b B (per N / C)^b; compare the logarithms of both sides
    left, right = a * A * N**-a, b * B * (per * N / C) ** b
    gap = sp.expand_log(sp.log(left.subs(N, best)) - sp.log(right.subs(N, best)), force=True)
    return sp.simplify(gap) == 0


@figure("chinchilla-allocation", "Loss at C = 1.2e24 operations, D = C/6N")
def draw_chinchilla(lab: Lab, fig: Figure) -> None:
    ax = fig.canvas.subplots()
    sizes = [10 ** (9.7 + 0.02 * i) for i in range(121)]
    for fit in (PUBLISHED, CORRECTED):
        best = fit.optimum(float(BUDGET))
        [line] = ax.plot(sizes, [fit.loss(n, BUDGET / 6 / n) for n in sizes], label=f"fit of {fit.source}")
        ax.plot(best.parameters, best.loss, "o", color=line.get_color())
        ax.annotate(
            f"N = {best.parameters:.3g}\n{best.ratio:.0f} tokens per parameter",
            (best.parameters, best.loss),
            xytext=(0, 11),
            textcoords="offset points",
            ha="center",
            va="bottom",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            color=line.get_color(),
            fontsize=8,
        )
    ax.axvline(1e11, color=GREY, linestyle="--", linewidth=1, label="rule D = 20 N: N = 1e11", zorder=0)
    ax.set_xscale("log")
    ax.set_xlabel("parameters N")
    ax.set_ylabel("predicted loss, nats per token")
    fig.canvas.legend(loc="outside lower center", ncols=3)


@claim("jl-dimension")
def jl_dimension(lab: Lab) -> Iterator[Finding]:
    sheet = johnson_lindenstrauss(POINTS, EPS)
    found = {
        "8 ln(m)/eps²": (sheet.formula, 22_105),
        "4 ln(m)/(eps²/2 - eps³/3), squared distances": (sheet.strict, 23_684),
        "exact chi², squared distances, 1 %": (sheet.exact_squared, 23_821),
        "exact chi², distances, 1 %": (sheet.exact_distance, 5_764),
    }
    for name, (value, stated) in found.items():
        yield lab.numerical(name, abs(value - stated), 0, dimension=value)
    yield lab.numerical("before rounding up", half_units(8 * math.log(POINTS) / EPS**2, "22104.8169"), 1)
    yield from _mpmath_parts(lab)
    k = 20 if lab.broken else math.ceil(8 * math.log(64) / 0.3**2)
    violations, squared = _projection(lab, k)
    yield lab.statistical(
        "64 points from 2,000 dimensions",
        violations,
        0,
        math.exp(log_union_bound(64, k, 0.49, 1.69)),
        k=k,
        pairs=2016,
        squared_distances_off=squared,
        union_bound_squared=math.exp(log_union_bound(64, k, 0.7, 1.3)),
    )
    yield lab.exact("no dimension is required", _points_on_a_line(), formula=johnson_lindenstrauss(10_000, EPS).formula)


def union_bound(k: int, low: str, high: str) -> float:
    """C(m,2) P(chi²_k/k < low or > high) for m = 1e12 with 40 digits; independent of the size sheet's expansions."""
    with mpmath.workdps(40):
        a, m = mpmath.mpf(k) / 2, mpmath.mpf(POINTS)
        tails = mpmath.gammainc(a, 0, a * mpmath.mpf(low), regularized=True)
        tails += mpmath.gammainc(a, a * mpmath.mpf(high), mpmath.inf, regularized=True)
        return float(m * (m - 1) / 2 * tails)


def _mpmath_parts(lab: Lab) -> Iterator[Finding]:
    squared, distance = ("0.9", "1.1"), ("0.81", "1.21")
    near = {
        "squared distances": (union_bound(23_821, *squared), union_bound(23_820, *squared)),
        "distances": (union_bound(5_764, *distance), union_bound(5_763, *distance)),
    }
    yield lab.numerical(
        "least dimension for 1 %, by mpmath",
        sum(at > 0.01 for at, _ in near.values()) + sum(below <= 0.01 for _, below in near.values()),
        0,
        bounds=near,
    )
    chernoff = POINTS * (POINTS - 1) * math.exp(-22_105 * (EPS**2 / 2 - EPS**3 / 3) / 2)
    at_formula = union_bound(22_105, *squared), union_bound(22_105, *distance)
    yield lab.numerical(
        "what 22,105 guarantees",
        max(half_units(chernoff, "39.8"), half_units(at_formula[0], "0.579"), half_units(at_formula[1], "8.5e-72")),
        1,
        chernoff=chernoff,
        exact_squared=at_formula[0],
        exact_distance=at_formula[1],
    )


def _projection(lab: Lab, k: int) -> tuple[int, int]:
    """Pairs of 64 points whose distance (and whose squared distance) a Gaussian projection changes by over 30 %."""
    rng = lab.rng()
    points = rng.standard_normal((64, 2000))
    projected = points @ rng.standard_normal((2000, k)) / math.sqrt(k)
    first, second = np.triu_indices(64, 1)
    ratio = np.linalg.norm(projected[first] - projected[second], axis=1)
    ratio /= np.linalg.norm(points[first] - points[second], axis=1)
    return int((abs(ratio - 1) > 0.3).sum()), int((abs(ratio**2 - 1) > 0.3).sum())


def _points_on_a_line() -> bool:
    """Points n·u along the unit vector u = (3, 4)/5: one coordinate, 5n, holds every distance of the whole numbers."""
    plane = [(3 * n, 4 * n) for n in range(10_000)]
    line = [(3 * x + 4 * y) // 5 for x, y in plane]
    pairs = ((i, j) for i in range(0, 10_000, 97) for j in range(i))
    return all(
        (plane[i][0] - plane[j][0]) ** 2 + (plane[i][1] - plane[j][1]) ** 2 == (line[i] - line[j]) ** 2
        for i, j in pairs
    )


@figure("jl-dimension", "Dimensions that suffice for 10¹² points under a random projection")
def draw_jl(lab: Lab, fig: Figure) -> None:
    eps = [0.05 * 1.09**i for i in range(28)]
    sheets = [johnson_lindenstrauss(POINTS, e) for e in eps]
    ax = fig.canvas.subplots()
    ax.plot(eps, [s.formula for s in sheets], label="8 ln(m)/eps², as taught")
    ax.plot(eps, [s.exact_squared for s in sheets], "--", label="exact, squared distances, 1 % failure")
    ax.plot(eps, [s.exact_distance for s in sheets], label="exact, distances, 1 % failure")
    ax.axvline(EPS, color=GREY, linewidth=0.8, linestyle=":")
    for k in (22_105, 5_764):
        ax.plot(EPS, k, "o", color="black", markersize=4)
        ax.annotate(f"{k:,}", (EPS, k), xytext=(-5, -4), textcoords="offset points", ha="right", va="top")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks([0.05, 0.1, 0.2, 0.4], ["0.05", "0.1", "0.2", "0.4"])
    ax.minorticks_off()
    ax.set_xlabel("distortion eps")
    ax.set_ylabel("dimension k")
    ax.legend(loc="upper right")
