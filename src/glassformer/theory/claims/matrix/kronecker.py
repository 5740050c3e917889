"""Attention over all tokens at once, as one large matrix: a Kronecker product, not sparse, not of low rank."""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import sympy
import torch

from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, Figure
from glassformer.model.attention import Attention
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.weights.layer import layer, normal, run, shape
from glassformer.theory.claims.weights.rational import rank, rational

SIZES = [(n, d) for n in (1, 2, 3) for d in (1, 2, 3)]


@claim("attention-kronecker-form")
def kronecker_form(lab: Lab) -> Iterator[Finding]:
    plain = lab.broken
    gaps = {(n, d): _symbolic_gap(n, d, transposed=not plain) for n, d in SIZES}
    wrong = sum(gap for gap in gaps.values())
    yield lab.exact("A kron W^T", wrong == 0, sizes=SIZES, entries_off=wrong)
    missed = sum(_symbolic_gap(n, d, transposed=False) > 0 for n, d in SIZES if d > 1)
    yield lab.exact("A kron W fails", missed == sum(d > 1 for _, d in SIZES), sizes=missed)
    yield _any_size(lab, transposed=not plain)
    yield _factors(lab)
    yield _determinant(lab)
    yield _ranks(lab)
    yield _zeros(lab)
    yield from _on_the_engine(lab)


def _symbolic_gap(n: int, d: int, transposed: bool) -> int:
    """How many of the N D entries differ."""
    a, x, w = (
        sympy.Matrix(rows, columns, sympy.symbols(f"{name}:{rows * columns}"))
        for name, rows, columns in (("a", n, n), ("x", n, d), ("w", d, d))
    )
    stacked = sympy.kronecker_product(a, w.T if transposed else w) * sympy.Matrix(list(x))
    return sum(sympy.expand(left - right) != 0 for left, right in zip(stacked, a * x * w, strict=True))


def _any_size(lab: Lab, transposed: bool) -> Finding:
    """The coefficient of X[m,p] in Y[n,l] = sum A[n,m] X[m,p] W[p,l], for symbolic sizes and indices."""
    n, m, p, l, i, j = sympy.symbols("n m p l i j", cls=sympy.Idx)  # noqa: E741
    a, x, w = (sympy.IndexedBase(name) for name in "AXW")
    inside = a[n, i] * x[i, j] * w[j, l]
    derivative = sympy.diff(inside, x[m, p])
    selected = derivative == a[n, i] * w[j, l] * sympy.KroneckerDelta(i, m) * sympy.KroneckerDelta(j, p)
    # summed over i < N and j < D the deltas pick i = m and j = p
    coefficient = (a[n, i] * w[j, l]).subs({i: m, j: p})
    entry = a[n, m] * (w[p, l] if transposed else w[l, p])
    return lab.exact("any N and D", bool(selected) and coefficient == entry)


def _factors(lab: Lab) -> Finding:
    holds = True
    for n, d in SIZES:
        a = sympy.Matrix(n, n, sympy.symbols(f"a:{n * n}"))
        w = sympy.Matrix(d, d, sympy.symbols(f"w:{d * d}"))
        product = sympy.kronecker_product(a, sympy.eye(d)) * sympy.kronecker_product(sympy.eye(n), w.T)
        holds &= product == sympy.kronecker_product(a, w.T)
    return lab.exact("factors", holds)


def _determinant(lab: Lab) -> Finding:
    holds = True
    for n, d in ((1, 2), (2, 1), (2, 2)):
        a = sympy.Matrix(n, n, sympy.symbols(f"a:{n * n}"))
        w = sympy.Matrix(d, d, sympy.symbols(f"w:{d * d}"))
        whole = sympy.kronecker_product(a, w.T).det(method="berkowitz")
        holds &= sympy.expand(whole - a.det() ** d * w.det() ** n) == 0
    rng = lab.rng()
    for n, d in ((2, 3), (3, 2), (3, 3)):
        a, w = (sympy.Matrix(rng.integers(-3, 4, (k, k))) for k in (n, d))
        holds &= sympy.kronecker_product(a, w.T).det() == a.det() ** d * w.det() ** n
    return lab.exact("determinant", bool(holds))


def _ranks(lab: Lab) -> Finding:
    """rank(A kron W^T) = rank A rank W for all 2 x 2 matrices with entries 0 and 1, and the dense full-rank example."""
    matrices = [rational(np.array(entries).reshape(2, 2)) for entries in itertools.product((0, 1), repeat=4)]
    ranks = [rank(m) for m in matrices]
    wrong = sum(
        rank(np.kron(a, w.T)) != first * second
        for a, first in zip(matrices, ranks, strict=True)
        for w, second in zip(matrices, ranks, strict=True)
    )
    stochastic = rational([[2, 1], [1, 2]], 3)
    full = rank(np.kron(stochastic, rational(np.eye(2, dtype=int))))
    return lab.exact("ranks", wrong == 0 and full == 4, pairs=len(matrices) ** 2, example=full)


def _zeros(lab: Lab) -> Finding:
    wrong = 0
    for n, d in itertools.product(range(1, 6), repeat=2):
        w = np.arange(1, d * d + 1).reshape(d, d)
        shared, mixed = np.kron(np.eye(n, dtype=int), w.T), np.kron(np.ones((n, n), dtype=int), w.T)
        filled, distinct = int(np.count_nonzero(shared)), len(set(shared[shared != 0].tolist()))
        wrong += filled != n * d * d or Fraction(filled, shared.size) != Fraction(1, n) or distinct != d * d
        wrong += np.count_nonzero(mixed) != mixed.size
    return lab.exact("zeros", wrong == 0, sizes=25, largest=5)


def _on_the_engine(lab: Lab) -> Iterator[Finding]:
    generator, n, d = lab.torch_rng(), 5, 4
    q, k, v = (normal(generator, d, d) / 2 for _ in range(3))
    attention, x = layer(q, k, v, torch.eye(d, dtype=torch.float64)), normal(generator, n, d)
    seen = run(attention, x)
    a, y = seen["pattern"][0], seen["out"]
    big = torch.kron(a, v if lab.broken else v.T.contiguous())
    size = torch.kron(a, v.T.contiguous().abs()) @ x.abs().flatten()
    ratio = float(((big @ x.flatten() - y.flatten()).abs() / (2 * (n * d + 2) * UNIT * size)).max())
    gap = max_difference(big @ x.flatten(), y.flatten())
    yield lab.numerical("engine, output", ratio, 1.0, difference=gap, tokens=n, width=d)
    worst = 0.0
    for site, w in (("q", q), ("k", k), ("v", v)):
        shared = torch.kron(torch.eye(n, dtype=torch.float64), w.T.contiguous()) @ x.flatten()
        worst = max(worst, max_difference(shared, seen[site][0].flatten()))
    yield lab.numerical("engine, projections", worst, 1e-14)
    off = max_difference(_jacobian(attention, x), big)
    yield lab.numerical("Jacobian is another matrix", off, None, low=1e-3)
    bent = max_difference(run(attention, 2 * x)["out"], 2 * y)
    yield lab.numerical("not linear", bent, None, low=1e-3)


def _jacobian(attention: Attention, x: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    """Central differences, column by column."""
    columns = []
    for direction in torch.eye(x.numel(), dtype=torch.float64):
        nudge = step * direction.reshape(x.shape)
        columns.append((run(attention, x + nudge)["out"] - run(attention, x - nudge)["out"]).flatten() / (2 * step))
    return torch.stack(columns, dim=1)


@figure("attention-kronecker-form", "5 tokens of width 4: what maps all values at once", height=3.5)
def draw_kronecker(lab: Lab, fig: Figure) -> None:
    from matplotlib.ticker import MaxNLocator

    from glassformer.lens.figures.attention import draw_map

    generator, n, d = lab.torch_rng(), 5, 4
    q, k, v = (normal(generator, d, d) / 2 for _ in range(3))
    a = run(layer(q, k, v, torch.eye(d, dtype=torch.float64)), normal(generator, n, d))["pattern"][0]
    axes = fig.canvas.subplots(1, 2)
    for ax, left, title in (
        (axes[0], a, r"$A \otimes W_v^{\top}$: depends on the input"),
        (axes[1], torch.eye(n, dtype=torch.float64), r"$I \otimes W_v^{\top}$: learned, shared"),
    ):
        matrix = torch.kron(left, v.T.contiguous())
        limit = float(matrix.abs().max())
        shown = draw_map(ax, matrix, -limit, limit)
        edges = np.arange(n + 1) * d - 0.5
        ax.hlines(edges, -0.5, n * d - 0.5, color="black", lw=0.5)
        ax.vlines(edges, -0.5, n * d - 0.5, color="black", lw=0.5)
        centres = edges[:-1] + d / 2
        ax.set_xticks(centres, range(n))
        ax.set_yticks(centres, range(n))
        ax.tick_params(length=0)
        ax.set(title=title, xlabel="token read (blocks)", ylabel="token written (blocks)")
        fig.canvas.colorbar(shown, ax=ax, location="bottom", shrink=0.7, ticks=MaxNLocator(5))


def dense_weights(n: int, d: int) -> int:
    """Of a dense layer over all N D numbers at once."""
    return n * n * d * d


@claim("dense-vs-attention-params")
def dense_against_attention(lab: Lab) -> Iterator[Finding]:
    tokens, width = sympy.symbols("N D", positive=True)
    paid = tokens if lab.broken else 1  # the control: every position has matrices of its own
    ratio = sympy.simplify((tokens * width) ** 2 / (3 * paid * width**2))
    whole = sympy.simplify((tokens * width) ** 2 / (4 * paid * width**2))
    yield lab.exact("ratio", ratio == tokens**2 / 3 and whole == tokens**2 / 4, ratio=str(ratio))
    dense, attention = dense_weights(100, 512), 3 * 512**2 * (100 if lab.broken else 1)
    holds = (dense, attention) == (2_621_440_000, 786_432) and Fraction(dense, attention) == Fraction(10_000, 3)
    holds &= Fraction(dense, attention + attention // 3) == 2500
    yield lab.exact("the example", holds, dense=dense, attention=attention, ratio=dense / attention)
    counted = {}
    for n, d in ((3, 4), (5, 8)):
        layers = [Attention(shape(d, 1, d, d)) for _ in range(n if lab.broken else 1)]
        three = sum(p.numel() for one in layers for name, p in one.named_parameters() if name[0] in "qkv")
        four = sum(p.numel() for one in layers for p in one.parameters())
        full = torch.nn.Linear(n * d, n * d, bias=False, device="meta").weight.numel()
        counted[f"N={n}, D={d}"] = [full, three, four]
    expected = {"N=3, D=4": [144, 48, 64], "N=5, D=8": [1600, 192, 256]}
    yield lab.exact("counted layers", counted == expected, counted=counted)
    fewer = [n for n in range(1, 1001) if 3 * (n if lab.broken else 1) < n * n]
    yield lab.exact("fewer from two tokens on", fewer == list(range(2, 1001)), root=math.sqrt(3))


@figure("dense-vs-attention-params", "Weights to mix N tokens of width {width:g}", height=3.0)
def draw_counts(lab: Lab, fig: Figure) -> None:
    tokens = np.unique(np.geomspace(1, 4096, 60).round())
    width = int(lab.knobs["width"])
    ax = fig.canvas.subplots()
    curves: list[tuple[str, Any]] = [
        ("dense layer, N²D²", dense_weights(1, width) * tokens**2),
        ("attention with output projection, 4D²", np.full_like(tokens, 4 * width**2)),
        ("attention, 3D²", np.full_like(tokens, 3 * width**2)),
    ]
    for (label, counts), colour in zip(curves, COLOURS, strict=False):
        ax.loglog(tokens, counts, color=colour, label=label)
    ax.plot(100, dense_weights(100, width), "o", color=COLOURS[0])
    ax.annotate(
        f"N = 100: {dense_weights(100, width):,}", (100, dense_weights(100, width)), (8, -4),
        textcoords="offset points", va="top",
    )  # fmt: skip
    ax.set(xlabel="tokens N", ylabel="weights", xlim=(1, 4096))
    ax.legend(loc="upper left")
