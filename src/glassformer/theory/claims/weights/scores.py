"""Dot products of random vectors: their variance, and why scores are divided by the square root of the width."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import sympy
import torch
from sympy.ntheory import multinomial_coefficients

from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, Figure
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.weights.layer import Notes, layer
from glassformer.theory.claims.weights.samples import (
    DELTA,
    Samples,
    dkw_threshold,
    half_width,
    largest_gap,
    median_of_means,
)
from glassformer.theory.claims.weights.simplex import FLOAT32_LIMIT

SAMPLES, GROUPS = 1_110_000, 111
QUERIES, KEYS = 4000, 64
WIDTHS = (16, 64, 256, 1024)
MEASURED = {
    ("unscaled", "largest weight"): {16: 0.57, 64: 0.79, 256: 0.905},
    ("unscaled", "entropy"): {16: 1.42, 64: 0.58, 256: 0.25},
    ("unscaled", "jacobian"): {16: 0.295},
    ("scaled", "jacobian"): {16: 0.180},
}
"""Recorded means at 400 queries; 4000 must come within their half-widths."""


@claim("dot-product-variance")
def dot_product_variance(lab: Lab) -> Iterator[Finding]:
    same = lab.broken
    for power, expected in ((1, "0"), (2, "D"), (4, "3*D**2 + 6*D")):
        wrong = sum(moment(width, power, same) != value(expected, width) for width in range(1, 7))
        yield lab.exact(f"moment {power}", wrong == 0, widths=6, equals=expected)
    yield _any_width(lab)
    yield _laplace(lab)
    for width in (16, 64, 512):
        products = gaussian_products(lab, width, SAMPLES, same)
        yield _mean_square(lab, f"Gaussian, D={width}", products, width)
    products = sign_products(lab.rng(1), 512, SAMPLES, same)
    yield _mean_square(lab, "signs, D=512", products, 512)
    pairs = gaussian_products(lab, 2, 20_000, same)
    cdf = np.where(pairs < 0, 0.5 * np.exp(np.minimum(pairs, 0)), 1 - 0.5 * np.exp(-np.maximum(pairs, 0)))
    yield lab.statistical("Laplace, D=2", largest_gap(cdf), dkw_threshold(20_000), DELTA, samples=20_000)
    deviation = math.sqrt(512)
    yield lab.exact("deviation at 512", round(deviation, 4) == 22.6274, deviation=deviation)


def value(formula: str, width: int) -> Any:
    return sympy.sympify(formula).subs("D", width)


def moment(width: int, power: int, same: bool = False) -> int:
    """E[(a.b)^power] for standard normal components, by expansion; with `same`, b is a."""

    def normal_moment(k: int) -> int:
        return 0 if k % 2 else math.prod(range(1, k, 2))  # the odd numbers below k

    def product_moment(k: int) -> int:
        """E[(a_i b_i)^k]."""
        return normal_moment(2 * k) if same else normal_moment(k) ** 2

    terms = multinomial_coefficients(width, power).items()
    return sum(int(count) * math.prod(product_moment(k) for k in powers) for powers, count in terms)


def _any_width(lab: Lab) -> Finding:
    """E[(a.b)^2] = sum_ij E[a_i a_j] E[b_i b_j] = sum_ij delta_ij^2, without a distribution."""
    width = sympy.Symbol("D", integer=True, positive=True)
    # the sum over i and j of S_ij T_ij is tr(S T^T); with b = a, E[a_i^2 a_j^2] is 1 or more off the diagonal too
    moments = sympy.OneMatrix(width, width) if lab.broken else sympy.Identity(width)
    total = sympy.Trace(moments * moments.T).doit()
    fourth = sympy.expand(9 * width + 3 * width * (width - 1) - (3 * width**2 + 6 * width)) == 0
    return lab.exact("any D, any distribution", sympy.simplify(total - width) == 0 and fourth)


def _laplace(lab: Lab) -> Finding:
    """E e^(i t a b) = E e^(-t^2 b^2 / 2) = (1 + t^2)^(-1/2), and its square is Laplace's characteristic function."""
    t, b, x = sympy.symbols("t b x", positive=True)
    wide = 1 / sympy.sqrt(1 + t**2)  # with b = wide y, e^(-t^2 b^2 / 2) e^(-b^2 / 2) db becomes wide e^(-y^2 / 2) dy
    substituted = sympy.simplify((-(t**2) * b**2 / 2 - b**2 / 2).subs(b, wide * x) + x**2 / 2) == 0
    # the transform of e^(-|x|)/2 is the integral of e^(-x) cos(t x) over x > 0, of which this is the antiderivative
    rising = sympy.exp(-x) * (t * sympy.sin(t * x) - sympy.cos(t * x)) / (1 + t**2)
    integrated = sympy.simplify(sympy.diff(rising, x) - sympy.exp(-x) * sympy.cos(t * x)) == 0
    holds = substituted and integrated and sympy.simplify(wide**2 + rising.subs(x, 0)) == 0
    return lab.exact("Laplace for D=2", holds)


def gaussian_products(lab: Lab, width: int, count: int, same: bool = False) -> Samples:
    """a.b for independent standard normal vectors.

    From width 64 on one vector is drawn through its length only: given a, a.b is normal with variance |a|^2, and
    |a|^2 is chi-squared. That is the same law, for two numbers instead of 2 D.
    """
    if width >= 64:
        rng = lab.rng(width)
        squares = rng.chisquare(width, count)
        return squares if same else np.sqrt(squares) * rng.standard_normal(count)
    generator, parts = lab.torch_rng(width), []
    for start in range(0, count, 30_000):
        a, b = torch.randn(2, min(30_000, count - start), width, generator=generator)
        parts.append(torch.linalg.vecdot(a, a if same else b))
    products: Samples = torch.cat(parts).double().numpy()
    return products


def sign_products(rng: np.random.Generator, width: int, count: int, same: bool = False) -> Samples:
    """Return a.b for vectors of independent signs: D minus twice the number of entries where they differ."""
    a, b = rng.integers(0, 2**64, size=(2, count, width // 64), dtype=np.uint64)
    differing = np.bitwise_count(a ^ (a if same else b)).sum(axis=1, dtype=np.int64)
    return (width - 2 * differing).astype(np.float64)


def _mean_square(lab: Lab, name: str, products: Samples, width: int) -> Finding:
    estimate = median_of_means(products**2, GROUPS) / width
    return lab.statistical(
        name,
        abs(estimate - 1),
        2 * math.sqrt((2 + 6 / width) * GROUPS / len(products)),
        math.exp(-GROUPS / 8),
        estimate_over_D=estimate,
        samples=len(products),
    )


@figure("dot-product-variance", "Dot products of standard normal vectors", height=2.7)
def draw_products(lab: Lab, fig: Figure) -> None:
    axes = fig.canvas.subplots(1, 3)
    for ax, width, colour in zip(axes, (1, 16, 256), COLOURS, strict=False):
        products = gaussian_products(lab, width, 200_000)
        reach = 4 * math.sqrt(width)
        ax.hist(products, bins=81, range=(-reach, reach), density=True, color=colour, alpha=0.6)
        x = np.linspace(-reach, reach, 200)
        ax.plot(x, np.exp(-(x**2) / (2 * width)) / math.sqrt(2 * math.pi * width), color="black", lw=1)
        ax.set(title=f"D = {width}, SD {math.sqrt(width):g}", xlabel="a · b", yticks=[])
    axes[0].set_ylabel("density (line: N(0, D))")


@claim("unit-variance-scaling")
def unit_variance(lab: Lab) -> Iterator[Finding]:
    c, width = sympy.symbols("c D", positive=True)
    found = sympy.solve(sympy.Eq(c**2 * width, 1), c)
    yield lab.exact("uniqueness", found == [1 / sympy.sqrt(width)])
    found = statistics(lab)
    if lab.broken:
        found["scaled"] = found["unscaled"]
    yield from _scaled_stays(lab, found["scaled"])
    yield from _unscaled_saturates(lab, found)
    yield from _recorded(lab, found)
    yield _no_overflow(lab, found["unscaled"][64]["largest score"])


Found = dict[str, dict[int, dict[str, Samples]]]
"""Form (scaled, unscaled), width, statistic."""


@torch.no_grad()
def statistics(lab: Lab) -> Found:
    """Per query, over 64 standard normal keys of its own: largest weight, entropy, norm of softmax's Jacobian.

    The engine's attention projects queries by the identity and takes its own default scale, or the scale 1. From width
    256 on a key is drawn as z q/|q| with z normal: what is orthogonal to the query never enters a score.
    """
    found: Found = {"scaled": {}, "unscaled": {}}
    for width in WIDTHS:
        eye, none = torch.eye(width), torch.zeros(width, 1)
        forms = {form: layer(eye, eye, none, none.T, scale=s) for form, s in (("scaled", None), ("unscaled", 1.0))}
        parts: dict[str, list[list[torch.Tensor]]] = {form: [] for form in forms}
        generator, rows = lab.torch_rng(width), 200
        for _ in range(QUERIES // rows):
            x = torch.randn(rows, 1, width, generator=generator)
            k = torch.randn(rows, 1, KEYS, width if width < 256 else 1, generator=generator)
            if width >= 256:
                k = k * (x / x.norm(dim=-1, keepdim=True))[:, None]
            for form, attention in forms.items():
                notes = Notes()
                attention(x, tap=notes, kv=(k, k[..., :1]))
                parts[form].append(_measure(notes["pattern"][:, 0, 0].double(), notes["scores"][:, 0, 0].double()))
        for form, rows_of in parts.items():
            columns = (torch.cat(column).numpy() for column in zip(*rows_of, strict=True))
            found[form][width] = dict(zip(STATISTICS, columns, strict=True))
    return found


STATISTICS = ("largest weight", "entropy", "jacobian", "largest score")


def _measure(p: torch.Tensor, scores: torch.Tensor) -> list[torch.Tensor]:
    # the Jacobian is diag(p) - p p^T, the square of its norm sum p^2 - 2 sum p^3 + (sum p^2)^2
    squares, cubes = p.square().sum(-1), p.pow(3).sum(-1)
    jacobian = (squares - 2 * cubes + squares**2).clamp(min=0).sqrt()
    return [p.amax(-1), torch.special.entr(p).sum(-1), jacobian, scores.abs().amax(-1)]


SPAN = {"largest weight": 1.0, "entropy": math.log(KEYS), "jacobian": math.sqrt(0.5)}
"""Each lies between 0 and this; the Jacobian's eigenvalues are at most 1/2 and sum to at most 1, hence its norm."""


def summary(samples: dict[str, Samples], name: str) -> tuple[float, float]:
    """Mean, and how far it may be from its expectation but for DELTA."""
    return float(samples[name].mean()), half_width(samples[name], SPAN[name])


def _scaled_stays(lab: Lab, scaled: dict[int, dict[str, Samples]]) -> Iterator[Finding]:
    for d in WIDTHS:
        mean, half = summary(scaled[d], "largest weight")
        yield lab.statistical(f"scaled, d={d}", mean, 0.13, DELTA, low=0.08, half_width=half, queries=QUERIES)
    entropies, halves = zip(*(summary(scaled[d], "entropy") for d in WIDTHS), strict=True)
    drift, bound = max(entropies) - min(entropies), 0.1 + 2 * max(halves)
    yield lab.statistical("scaled, entropy drift", drift, bound, DELTA, entropies=list(entropies))


def _unscaled_saturates(lab: Lab, found: Found) -> Iterator[Finding]:
    scaled, unscaled = found["scaled"], found["unscaled"]
    weights = [summary(unscaled[d], "largest weight")[0] for d in WIDTHS]
    for i, (d, e) in enumerate(itertools.pairwise(WIDTHS)):
        yield lab.statistical(
            f"unscaled grows, d={d} to {e}", weights[i] - weights[i + 1], 0.0, DELTA, means=list(weights)
        )
    mean = weights[WIDTHS.index(256)]
    yield lab.statistical("unscaled, d=256", -mean, -0.8, DELTA)
    mean, half = summary(unscaled[256], "entropy")
    yield lab.statistical("unscaled entropy, d=256", mean, 0.5, DELTA, half_width=half)
    (loose, one), (tight, two) = summary(unscaled[256], "jacobian"), summary(scaled[256], "jacobian")
    half = one + two
    yield lab.statistical("Jacobian, d=256", loose - tight, 0.0, DELTA, means=[loose, tight], half_widths=half)


def _recorded(lab: Lab, found: Found) -> Iterator[Finding]:
    for (form, name), values in MEASURED.items():
        for d, recorded in values.items():
            samples = found[form][d][name]
            # 400 queries then, 4000 now: five standard errors of the difference, and the rounding of the record
            bound = 5 * float(samples.std()) * math.sqrt(1 / 400 + 1 / QUERIES) + 0.005
            off = abs(float(samples.mean()) - recorded)
            id = f"recorded, {form}, {name}, d={d}"
            yield lab.statistical(id, off, bound, DELTA, mean=float(samples.mean()), recorded=recorded)


def _no_overflow(lab: Lab, largest: Samples) -> Finding:
    """Chernoff: E e^(l q.k) = (1 - l^2)^(-d/2), at the best l."""
    d, t = 64, FLOAT32_LIMIT
    best = (math.sqrt(d * d + 4 * t * t) - d) / (2 * t)
    chance = 2 * QUERIES * KEYS * math.exp(-best * t - d / 2 * math.log1p(-best * best))
    return lab.statistical(
        "unscaled scores stay below float32's limit",
        float(largest.max()),
        t,
        chance,
        largest_of_25600=float(largest[:400].max()),
        width=d,
    )


@figure("unit-variance-scaling", "Softmax over 64 keys with and without the factor 1/√d", height=2.9)
def draw_saturation(lab: Lab, fig: Figure) -> None:
    left, right = fig.canvas.subplots(1, 2)
    for (form, found), colour in zip(statistics(lab).items(), COLOURS, strict=False):
        for ax, name in ((left, "largest weight"), (right, "entropy")):
            ax.semilogx(WIDTHS, [found[d][name].mean() for d in WIDTHS], "o-", color=colour, label=form, base=2)
    for ax, name, top in ((left, "mean largest weight", 1.0), (right, "mean entropy (nats)", math.log(KEYS))):
        ax.set(xlabel="width d", ylabel=name, ylim=(0, 1.05 * top))
        ax.set_xticks(WIDTHS, [str(d) for d in WIDTHS])
        ax.minorticks_off()
    right.axhline(math.log(KEYS), color="#666666", ls=":", lw=1)
    right.annotate("even weights", (16, math.log(KEYS)), (0, -3), textcoords="offset points", va="top", color="#666666")
    left.legend(loc="center right")
