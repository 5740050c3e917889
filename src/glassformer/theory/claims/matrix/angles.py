"""Angles between random vectors in many dimensions: how near to a right angle, exactly and on average."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import mpmath
import numpy as np
import sympy
from numpy.typing import NDArray

from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, Figure
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.registry import load_all
from glassformer.theory.claims.rounding import half_units
from glassformer.theory.claims.weights.samples import DELTA, dkw_threshold, largest_gap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

SAMPLES = 20_000
TABLE: dict[int, dict[str, str]] = {int(d): row for d, row in load_all()["angle-table"].data.items()}
"""Numbers of the statement by dimension (angles in degrees), as printed."""


def cosine_cdf(dimension: int, t: Array) -> Array:
    """P(|cos| <= t) for independent directions, one of them uniform: the regularised beta I_{t^2}(1/2, (D-1)/2).

    From D = 2 (arc sine) or 3 (uniform) in steps of two: G_{D+2} = G_D + t (1-t^2)^b / (b B(1/2, b)), b = (D-1)/2.
    """
    start = 3 if dimension % 2 else 2
    total = t.copy() if dimension % 2 else 2 / math.pi * np.arcsin(t)
    for d in range(start, dimension, 2):
        b = (d - 1) / 2
        log_beta = math.lgamma(0.5) + math.lgamma(b) - math.lgamma(b + 0.5)
        with np.errstate(divide="ignore"):
            total = total + t * np.exp(b * np.log1p(-t * t) - math.log(b) - log_beta)
    return np.minimum(total, 1.0)


def cosines(rng: np.random.Generator, dimension: int, count: int, axis_only: bool = False) -> Array:
    """Cosines of independent pairs, each uniform on the sphere; `axis_only`: each +e_1 or -e_1."""
    if axis_only:
        return rng.choice([-1.0, 1.0], count) * rng.choice([-1.0, 1.0], count)
    a, b = rng.standard_normal((2, count, dimension), dtype=np.float32).astype(np.float64)
    found: Array = np.einsum("ni,ni->n", a, b) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    return found


@claim("high-dim-orthogonality")
def nearly_orthogonal(lab: Lab) -> Iterator[Finding]:
    yield _second_moment(lab)
    yield _beta_moments(lab)
    yield _tail(lab)
    for d in (2, 10, 512):
        found = np.abs(cosines(lab.rng(d), d, SAMPLES, axis_only=lab.broken))
        gap = largest_gap(cosine_cdf(d, np.minimum(found, 1.0)))
        evidence = {"mean_square": float((found**2).mean()), "expected": 1 / d, "samples": SAMPLES}
        yield lab.statistical(f"sampled, D={d}", gap, dkw_threshold(SAMPLES), DELTA, **evidence)
    squares = [(a * b) ** 2 for a in (1, -1) for b in (1, -1)]
    yield lab.exact("symmetry is not enough", squares == [1] * 4, squared_cosines=squares)


def _second_moment(lab: Lab) -> Finding:
    """E[(a.b)^2] = a^T E[b b^T] a: 1/D for every unit vector a when E[b b^T] = I/D."""
    holds = True
    for d in range(2, 11):
        a = sympy.Matrix(sympy.symbols(f"a0:{d}", real=True))
        second = sympy.diag(1, *[0] * (d - 1)) if lab.broken else sympy.eye(d) / d
        squared_length = (a.T * a)[0]
        holds &= sympy.expand((a.T * second * a)[0] - squared_length / d) == 0
    return lab.exact("variance 1/D", holds)


def _beta_moments(lab: Lab) -> Finding:
    """E[x^k] = B(1/2 + k, b) / B(1/2, b) for x = cos^2, b = (D-1)/2; k = 1 and 2."""
    d = sympy.Symbol("D", positive=True)
    b = (d - 1) / 2

    def moment(k: int) -> Any:
        half = sympy.Rational(1, 2)
        ratio = sympy.gamma(half + k) * sympy.gamma(half + b) / (sympy.gamma(half) * sympy.gamma(half + k + b))
        return sympy.gammasimp(ratio)

    symbolic = sympy.simplify(moment(1) - 1 / d) == 0 and sympy.simplify(moment(2) - 3 / (d * (d + 2))) == 0
    wrong = 0
    for size in range(2, 11):
        # phi from 90 degrees: the density is proportional to cos(phi)^(D-2), and the cosine of the angle is sin(phi)
        whole, second, fourth = (_wallis(size - 2, k) for k in (0, 2, 4))
        wrong += second / whole != sympy.Rational(1, size)
        wrong += fourth / whole != sympy.Rational(3, size * (size + 2))
    return lab.exact("moments", bool(symbolic) and wrong == 0)


def _wallis(m: int, k: int) -> Any:
    """The integral of cos^m sin^k over (-pi/2, pi/2), k even: exactly, by (k-1)/(m+k) and (m-1)/m steps."""
    factor = sympy.Integer(1)
    while k:
        factor, k = factor * sympy.Rational(k - 1, m + k), k - 2
    while m > 1:
        factor, m = factor * sympy.Rational(m - 1, m), m - 2
    return factor * (sympy.pi if m == 0 else 2)


def _tail(lab: Lab) -> Finding:
    """P(|cos| >= t) <= 2 exp(-D t^2 / 2) against the exact beta tail, by mpmath: tiny tails need their digits."""
    violations, cases, closest = 0, 0, 0.0
    for d in (*range(2, 61), 100, 512, 1000):
        for step in range(1, 101):
            t = step / 100
            exact = mpmath.mpf(1) if lab.broken else mpmath.betainc((d - 1) / 2, 0.5, 0, 1 - t * t, regularized=True)
            bound = 2 * mpmath.exp(-d * t * t / 2)
            violations, cases = violations + int(exact > bound), cases + 1
            closest = max(closest, float(exact / bound))
    return lab.numerical("tail bound", float(violations), 0.0, cases=cases, closest_ratio=closest)


def density(dimension: int, degrees: Array) -> Array:
    """Of the angle, per degree: proportional to sin^(D-2)."""
    log = math.lgamma(dimension / 2) - math.lgamma((dimension - 1) / 2) - 0.5 * math.log(math.pi)
    with np.errstate(divide="ignore"):
        logs = (dimension - 2) * np.log(np.sin(np.radians(degrees)))
    return np.exp(log + logs) * math.pi / 180


@figure("high-dim-orthogonality", "Angle between two random directions", height=3.1)
def draw_densities(lab: Lab, fig: Figure) -> None:
    _draw_densities(fig.canvas.subplots(), (3, 10, 100, 512))


def _draw_densities(ax: "Axes", dimensions: tuple[int, ...]) -> None:
    degrees = np.linspace(0.1, 179.9, 1200)
    for d, colour in zip(dimensions, COLOURS, strict=False):
        ax.plot(degrees, density(d, degrees), color=colour, label=f"D = {d}")
    ax.set(xlabel="angle (degrees)", ylabel="density per degree", xlim=(0, 180), ylim=(0, None))
    ax.set_xticks(range(0, 181, 30))
    ax.legend()


@claim("angle-table")
def angle_table(lab: Lab) -> Iterator[Finding]:
    for d, stated in TABLE.items():
        found = quadrature(d + 1 if lab.broken else d, of=d)
        for name, value in found.items():
            yield lab.numerical(f"{name}, D={d}", half_units(value, stated[name]), 1, value=value, stated=stated[name])
        closed = closed_forms(d)
        off = max(abs(found[name] / value - 1) for name, value in closed.items())
        yield lab.numerical(f"closed forms, D={d}", off, 1e-8, **closed)
        cos = cosines(lab.rng(d), d, SAMPLES)
        cdf = 0.5 - 0.5 * np.sign(cos) * cosine_cdf(d, np.abs(cos))  # P(angle <= arccos(cos))
        evidence = {"mean": float(np.degrees(np.arccos(cos)).mean()), "samples": SAMPLES}
        yield lab.statistical(f"sampled, D={d}", largest_gap(cdf), dkw_threshold(SAMPLES), DELTA, **evidence)
        yield _cdf_by_quadrature(lab, d)


def quadrature(dimension: int, of: int | None = None) -> dict[str, float]:
    """The table's quantities by integrating sin^(D-2); `of` is the dimension whose 1/sqrt(D) is looked up."""
    root = 1 / math.sqrt(of or dimension)
    with mpmath.workdps(25):
        # angles from 90 degrees, phi: the density is cos^(D-2), narrow, so the range is cut where it has died out
        reach = min(mpmath.pi / 2, 16 / mpmath.sqrt(dimension))
        edges = mpmath.linspace(0, reach, 5)

        def integral(weight: Any, upper: Any = None) -> Any:
            inside = edges if upper is None else [0, upper]
            return mpmath.quad(lambda phi: weight(phi) * mpmath.cos(phi) ** (dimension - 2), inside)

        whole = integral(lambda phi: 1)
        spread = mpmath.sqrt(integral(lambda phi: phi**2) / whole)
        distance = integral(lambda phi: phi) / whole
        half = whole / 2
        middle = mpmath.findroot(lambda phi: integral(lambda x: 1, phi) - half, (0, 2 * distance), solver="anderson")
        within = integral(lambda phi: 1, mpmath.asin(root)) / whole
        values = (root, math.degrees(math.acos(root)), *(mpmath.degrees(v) for v in (spread, distance)))
        return {name: float(v) for name, v in zip(TABLE[10], (*values, mpmath.sin(middle), within), strict=True)}


def closed_forms(dimension: int) -> dict[str, float]:
    """For even D: SD^2 = pi^2/12 - sum 2/j^2 over even j up to D - 2; mean distance and P by recurrence in steps of 2.

    By parts, with m = D - 2 and phi the angle from 90 degrees: E phi^2 loses 2/m^2 per step, and
    K_m = (m-1)/m K_(m-2) - 1/m^2 is the integral of phi cos^m over (0, pi/2), I_m = (m-1)/m I_(m-2) that of cos^m.
    """
    with mpmath.workdps(40):
        variance, moment, whole = mpmath.pi**2 / 12, mpmath.pi**2 / 8, mpmath.pi / 2
        for m in range(2, dimension - 1, 2):
            variance -= mpmath.mpf(2) / m**2
            moment, whole = moment * (m - 1) / m - mpmath.mpf(1) / m**2, whole * (m - 1) / m
        spread, distance = mpmath.degrees(mpmath.sqrt(variance)), mpmath.degrees(moment / whole)
    within = float(cosine_cdf(dimension, np.array([1 / math.sqrt(dimension)]))[0])
    return {
        "SD of the angle": float(spread),
        "mean distance from 90": float(distance),
        "P(|cos| <= 1/sqrt(D))": within,
    }


def _cdf_by_quadrature(lab: Lab, dimension: int) -> Finding:
    """The CDF that samples are compared with, checked against its quadrature."""
    with mpmath.workdps(20):
        whole = mpmath.beta(0.5, (dimension - 1) / mpmath.mpf(2)) / 2
        worst = 0.0
        for scale in (0.1, 0.5, 1.0, 1.5, 2.0, 2.5):
            t = scale / math.sqrt(dimension)
            by_quadrature = mpmath.quad(lambda phi: mpmath.cos(phi) ** (dimension - 2), [0, mpmath.asin(t)]) / whole
            worst = max(worst, abs(float(cosine_cdf(dimension, np.array([t]))[0] / by_quadrature - 1)))
    return lab.numerical(f"CDF, D={dimension}", worst, 1e-8)


@figure("angle-table", "Angle between two random directions, with one standard deviation to each side", height=3.1)
def draw_bands(lab: Lab, fig: Figure) -> None:
    ax = fig.canvas.subplots()
    _draw_densities(ax, tuple(TABLE))
    for d, colour in zip(TABLE, COLOURS, strict=False):
        spread = closed_forms(d)["SD of the angle"]
        inside = np.linspace(90 - spread, 90 + spread, 200)
        ax.fill_between(inside, density(d, inside), color=colour, alpha=0.25, lw=0)
        table = math.degrees(math.acos(1 / math.sqrt(d)))
        ax.plot([table], density(d, np.array([table])), "o", ms=5, color=colour, label=f"arccos(1/√{d}) = {table:.1f}°")
    ax.legend(loc="upper left")
