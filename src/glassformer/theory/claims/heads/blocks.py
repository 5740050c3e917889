"""Several heads as a sum: the output projection in row blocks, and each block merged with its head's values."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import sympy
import torch

from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, Figure
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import gamma, max_difference
from glassformer.theory.claims.weights.layer import normal, random_layer, run

HEADS = (1, 2, 4, 8)


def cut(matrix: torch.Tensor, heads: int, interleaved: bool = False) -> list[torch.Tensor]:
    """W_o in H row blocks of U rows, head after head; `interleaved` takes every H-th row instead."""
    return [matrix[h::heads] for h in range(heads)] if interleaved else list(matrix.chunk(heads))


@claim("multihead-block-sum")
def block_sum(lab: Lab) -> Iterator[Finding]:
    yield _small(lab)
    yield _any_size(lab)
    worst, gaps = 0.0, {}
    for heads in HEADS:
        generator = lab.torch_rng(heads)
        attention = random_layer(generator, 16, heads, 3, 5)
        seen = run(attention, normal(generator, 7, 16))
        each, blocks = seen["heads"], cut(attention.o.weight.detach().T, heads, lab.broken)
        total = sum((h @ w for h, w in zip(each, blocks, strict=True)), torch.zeros(7, 16, dtype=torch.float64))
        size = sum(h.abs() @ w.abs() for h, w in zip(each, blocks, strict=True))
        gaps[heads] = max_difference(seen["out"], total)
        worst = max(worst, float(((seen["out"] - total).abs() / (2 * gamma(heads * 5) * size)).max()))
    yield lab.numerical("engine", worst, 1.0, heads=list(HEADS), differences=list(gaps.values()))


def _small(lab: Lab) -> Finding:
    """Two tokens of width 3, two heads with values of width 2, everything a symbol."""
    x, w = sympy.Matrix(2, 3, sympy.symbols("x:6")), sympy.Matrix(4, 3, sympy.symbols("o:12"))
    heads = []
    for h in range(2):
        pattern = sympy.Matrix(2, 2, sympy.symbols(f"a{h}_:4"))
        heads.append(pattern * x * sympy.Matrix(3, 2, sympy.symbols(f"v{h}_:6")))
    rows = ([0, 2], [1, 3]) if lab.broken else ([0, 1], [2, 3])
    parts = [h * w.extract(r, range(3)) for h, r in zip(heads, rows, strict=True)]
    gap = (sympy.Matrix.hstack(*heads) * w - parts[0] - parts[1]).applyfunc(sympy.expand)
    return lab.exact("two heads, all symbols", gap.is_zero_matrix is True)


def _any_size(lab: Lab) -> Finding:
    """[A | B] [[V], [W]] = A V + B W for blocks of any size; head by head this gives any H."""
    n, width, first, last = sympy.symbols("n D U_first U_last", integer=True, positive=True)
    done, head = sympy.MatrixSymbol("Done", n, first), sympy.MatrixSymbol("Head", n, last)
    upper, lower = sympy.MatrixSymbol("Upper", first, width), sympy.MatrixSymbol("Lower", last, width)
    product = sympy.block_collapse(sympy.BlockMatrix([[done, head]]) * sympy.BlockMatrix([[upper], [lower]]))
    expected = sympy.BlockMatrix([[done * upper + head * lower]])
    holds = product in (expected, done * upper + head * lower)
    return lab.exact("any size, any H", bool(holds))


@figure("multihead-block-sum", "Concatenated heads times the stacked blocks of the output projection", height=2.6)
def draw_blocks(lab: Lab, fig: Figure) -> None:
    from matplotlib.patches import Rectangle

    def block(ax: Any, x: float, y: float, w: float, h: float, colour: str, text: str) -> None:
        ax.add_patch(Rectangle((x, y), w, h, facecolor=colour, alpha=0.35, edgecolor="black", lw=1))
        ax.text(x + w / 2, y + h / 2, text, ha="center", va="center")

    blue, orange = COLOURS[:2]
    ax = fig.canvas.subplots()
    block(ax, 0.0, 0.5, 0.8, 1.0, blue, "$H_1$")
    block(ax, 0.8, 0.5, 0.8, 1.0, orange, "$H_2$")
    ax.text(1.85, 1.0, "×", ha="center", va="center", fontsize=13)
    block(ax, 2.1, 1.0, 1.4, 0.8, blue, "$W_1$")
    block(ax, 2.1, 0.2, 1.4, 0.8, orange, "$W_2$")
    ax.text(3.75, 1.0, "=", ha="center", va="center", fontsize=13)
    block(ax, 4.0, 0.5, 1.4, 1.0, blue, "$H_1 W_1$")
    ax.text(5.65, 1.0, "+", ha="center", va="center", fontsize=13)
    block(ax, 5.9, 0.5, 1.4, 1.0, orange, "$H_2 W_2$")
    for x, y, text in (
        (0.8, 0.38, "$n × 2U$"),
        (2.8, 0.08, "$2U × D$"),
        (4.7, 0.38, "$n × D$"),
        (6.6, 0.38, "$n × D$"),
    ):
        ax.text(x, y, text, ha="center", va="top", fontsize=8, color="#666666")
    ax.set(xlim=(-0.1, 7.4), ylim=(-0.15, 1.95), aspect="equal")
    ax.axis("off")


@claim("multihead-value-output-merge")
def value_output_merge(lab: Lab) -> Iterator[Finding]:
    yield _associativity(lab)
    yield _low_rank(lab)
    yield _storage(lab)
    generator = lab.torch_rng()
    heads, width, key, value = 4, 8, 3, 5
    attention, x = random_layer(generator, width, heads, key, value), normal(generator, 6, width)
    values = attention.v.weight.detach().T.split(value, dim=1)
    outputs = cut(attention.o.weight.detach().T, heads)
    if lab.broken:
        outputs = outputs[1:] + outputs[:1]
    q, k = (w.weight.detach().T.split(key, dim=1) for w in (attention.q, attention.k))
    total = torch.zeros(6, width, dtype=torch.float64)
    for h in range(heads):
        scores = (x @ q[h]) @ (x @ k[h]).T / math.sqrt(key)
        pattern = scores.exp() / scores.exp().sum(-1, keepdim=True)
        total += (pattern @ x) @ (values[h] @ outputs[h])
    gap = max_difference(run(attention, x)["out"], total)
    yield lab.numerical("engine against merged form", gap, 1e-13, heads=heads, key_width=key, value_width=value)


def _associativity(lab: Lab) -> Finding:
    """A (X V) O = (A X) (V O) per head, with the pattern as free symbols, and for symbols of any size."""
    x, wrong = sympy.Matrix(2, 3, sympy.symbols("x:6")), lab.broken
    v = [sympy.Matrix(3, 2, sympy.symbols(f"v{h}_:6")) for h in range(2)]
    o = [sympy.Matrix(2, 3, sympy.symbols(f"o{h}_:6")) for h in range(2)]
    a = [sympy.Matrix(2, 2, sympy.symbols(f"a{h}_:4")) for h in range(2)]
    separate = sum((a[h] * (x * v[h]) * o[h] for h in range(2)), sympy.zeros(2, 3))
    merged = sum((a[h] * x * (v[h] * o[h - 1 if wrong else h]) for h in range(2)), sympy.zeros(2, 3))
    small = (separate - merged).applyfunc(sympy.expand).is_zero_matrix is True
    n, width, value = sympy.symbols("n D U", integer=True, positive=True)
    A, X = sympy.MatrixSymbol("A", n, n), sympy.MatrixSymbol("X", n, width)
    V, O = sympy.MatrixSymbol("V", width, value), sympy.MatrixSymbol("O", value, width)  # noqa: E741
    any_size = (A * (X * V)) * O == (A * X) * (V * O)
    return lab.exact("identity", small and any_size, heads=2)


def _low_rank(lab: Lab) -> Finding:
    """W_v W_o passes through U dimensions: every minor of size U + 1 is zero."""
    wrong = cases = 0
    for width, value in ((2, 1), (3, 1), (3, 2)):
        v = sympy.Matrix(width, value, sympy.symbols(f"v:{width * value}"))
        o = sympy.Matrix(value, width, sympy.symbols(f"o:{width * value}"))
        picks = list(itertools.combinations(range(width), value + 1))
        minors = [sympy.expand((v * o).extract(r, c).det()) for r in picks for c in picks]
        wrong, cases = wrong + sum(m != 0 for m in minors), cases + len(minors)
    rng = lab.rng()
    for width, value in ((4, 2), (5, 2), (6, 3)):
        v, o = (sympy.Matrix(rng.integers(-3, 4, size)) for size in ((width, value), (value, width)))
        wrong, cases = wrong + int((v * o).rank() > value), cases + 1
    return lab.exact("rank at most U", wrong == 0, cases=cases)


def _storage(lab: Lab) -> Finding:
    d, h = sympy.symbols("D H", positive=True)
    ratio = sympy.simplify(h * d**2 / (2 * h * d * (d / h))) == h / 2
    attention = random_layer(lab.torch_rng(1), 512, 8, 1, 64)
    separate = attention.v.weight.numel() + attention.o.weight.numel()
    merged = sum(
        (v @ o).numel()
        for v, o in zip(
            attention.v.weight.detach().T.split(64, dim=1), cut(attention.o.weight.detach().T, 8), strict=True
        )
    )
    holds = ratio and merged == 2_097_152 == 8 * 512**2 and separate == 524_288 == 2 * 8 * 512 * 64
    return lab.exact("storage", bool(holds), merged=merged, separate=separate)
