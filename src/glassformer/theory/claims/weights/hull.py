"""The output of attention is a mean of values: it stays inside their convex hull."""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, Figure
from glassformer.theory.claims.claim import Lab, claim, figure, impossible, solve
from glassformer.theory.claims.rounding import UNIT
from glassformer.theory.claims.weights.layer import Notes, normal, random_layer, run
from glassformer.theory.claims.weights.rational import Matrix, corners, in_hull, kernel, random_matrix, weights


def signed(score: Fraction) -> Fraction:
    """The score itself, moved off zero: a kernel that may be negative. The control of the claim."""
    return score + Fraction(1, 7)


@claim("attention-output-convex-hull")
def output_in_hull(lab: Lab) -> Iterator[Finding]:
    of = signed if lab.broken else kernel
    rng = lab.rng()
    cases = [_rational_case(rng, of) for _ in range(40)]
    wrong = sum(_outside_box(y, v) for _, y, v in cases)
    yield lab.exact("columns", wrong == 0, cases=len(cases), tokens=5, outside=wrong)
    missed = sum(not in_hull(row, corners(v)) for _, y, v in cases for row in y)
    yield lab.exact("hull in the plane", missed == 0, points=5 * len(cases), outside=missed)
    longer = sum(max((y**2).sum(axis=1)) > max((v**2).sum(axis=1)) for _, y, v in cases)
    yield lab.exact("norms", longer == 0, cases=len(cases))
    lopsided = sum(bool((a != a.T).any() and (a.sum(axis=0) != 1).any()) for a, _, _ in cases)
    one = sum(bool((a.sum(axis=1) == 1).all()) for a, _, _ in cases)
    yield lab.exact("rows only", one == lopsided == len(cases), cases=len(cases))
    yield solve(lab, "any N", lambda z3: _two_points(z3, lab.broken))
    yield from _on_the_engine(lab)


def _rational_case(rng: np.random.Generator, of: Any) -> tuple[Matrix, Matrix, Matrix]:
    """Pattern, output and values of five tokens of width 2; a kernel that sums to 0 in a row is drawn again."""
    while True:
        q, k, v = (random_matrix(rng, 5, 2) for _ in range(3))
        try:
            pattern = weights(q, k, of=of)
        except ZeroDivisionError:
            continue
        return pattern, pattern @ v, v


def _outside_box(y: Matrix, v: Matrix) -> int:
    return int(((y < v.min(axis=0)) | (y > v.max(axis=0))).sum())


def _two_points(z3: Any, any_sign: bool) -> bool:
    share, point, mean, bound = z3.Reals("share point mean bound")
    shares = [] if any_sign else [share >= 0, share <= 1]
    return impossible(z3, point <= bound, mean <= bound, *shares, share * point + (1 - share) * mean > bound)


def _on_the_engine(lab: Lab) -> Iterator[Finding]:
    generator = lab.torch_rng()
    attention, x = random_layer(generator, 8, 2, 4, 4), 1.5 * normal(generator, 7, 8)
    notes = Affine() if lab.broken else Notes()
    with torch.no_grad():
        attention(x[None], tap=notes)
    a, v, y = notes["pattern"][0], notes["v"][0], notes["heads"][0]
    beyond = torch.maximum(y - v.amax(1, keepdim=True), v.amin(1, keepdim=True) - y)
    bound = 3 * a.shape[-1] * UNIT * float(v.abs().max())
    yield lab.numerical("engine, columns", max(0.0, float(beyond.max())), bound, tokens=7, heads=2)
    grown = float(y.norm(dim=-1).max() / v.norm(dim=-1).max())
    yield lab.numerical("engine, norms", grown, 1 + 6 * a.shape[-1] * UNIT)
    least = float(a.diagonal(dim1=1, dim2=2).min())
    yield lab.numerical("engine, own weight", least, None, low=math.exp(-30) / 7)
    skew = float((a - a.transpose(1, 2)).norm(dim=(1, 2)).min())
    yield lab.numerical("engine, not symmetric", skew, None, low=1e-3)
    columns = float((a.sum(1) - 1).abs().amax(-1).min())
    yield lab.numerical("engine, column sums", columns, None, low=1e-3)


class Affine(Notes):
    """Weights that still sum to 1 but may be negative, used instead of the pattern."""

    def __call__(self, site: str, value: torch.Tensor) -> torch.Tensor:
        return super().__call__(site, 4 * value - 3 * value.flip(-1) if site == "pattern" else value)


@figure("attention-output-convex-hull", "Outputs of one head are means of its values", height=3.6)
def draw_hull(lab: Lab, fig: Figure) -> None:
    from matplotlib.patches import Polygon

    generator = lab.torch_rng(3)
    attention, x = random_layer(generator, 4, 1, 4, 2), 2.2 * normal(generator, 9, 4)
    seen = run(attention, x)
    v, y = seen["v"][0].numpy(), seen["heads"][0].numpy()
    edge = [(float(a), float(b)) for a, b in corners(np.vectorize(Fraction, otypes=[object])(v))]
    ax = fig.canvas.subplots()
    ax.add_patch(Polygon(edge, facecolor=COLOURS[0], alpha=0.12, edgecolor="none"))
    ax.add_patch(Polygon(edge, fill=False, edgecolor=COLOURS[0], lw=1))
    for a, b in zip(v, y, strict=True):
        ax.annotate("", b, a, arrowprops={"arrowstyle": "->", "color": "#999999", "lw": 0.6})
    ax.plot(*v.T, "o", color=COLOURS[0], label="values of the tokens")
    ax.plot(*y.T, "s", color=COLOURS[1], label="outputs, each joined to its token's value")
    ax.set(xlabel="first component", ylabel="second component")
    ax.margins(0.08)
    fig.canvas.legend(loc="outside lower center", ncols=2)
