"""A position concatenated with the token or added to it: the effect of one linear map on both."""

import itertools
from collections.abc import Iterator
from typing import Any, cast

import sympy as sp
import torch
from sympy.polys.matrices import DM
from torch import nn

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.lens.trace import trace
from glassformer.model import Model, build
from glassformer.model.positions import sinusoids
from glassformer.theory.claims.claim import Lab, claim, figure, impossible, solve
from glassformer.theory.claims.rounding import gamma
from glassformer.theory.claims.small_models import one_layer

Matrix = tuple[tuple[int, ...], ...]


def _config(width: int, d_head: int, position: Any = c.NoPosition()) -> c.DecoderConfig:
    return one_layer(
        c.DecoderConfig,
        vocab_size=11,
        d_model=width,
        attention=c.Attention(1, d_head=d_head),
        position=position,
        placement="post",
        max_len=64,
        init_std=0.5,
    )


def _query(model: Model) -> nn.Linear:
    """The query projection of the first block."""
    attention: Any = model.blocks[0].attention
    return cast(nn.Linear, attention.q)


# ---------------------------------------------------------------- concat-linear-split


@claim("concat-linear-split")
def split(lab: Lab) -> Iterator[Finding]:
    """The two halves of the matrix, taken in the wrong order under `broken`."""
    whole = sp.Matrix(3, 4, sp.symbols("w:12"))
    x, e = sp.Matrix(sp.symbols("x:2")), sp.Matrix(sp.symbols("e:2"))
    first, second = whole[:, :2], whole[:, 2:]
    if lab.broken:
        first, second = second, first
    rest = sp.expand(whole * x.col_join(e) - first * x - second * e)
    yield lab.exact("symbolic 3 x (2+2)", rest == sp.zeros(3, 1), difference=str(list(rest)))
    yield _split_blocks(lab)
    yield _split_engine(lab)


def _split_blocks(lab: Lab) -> Finding:
    """The same with matrices of symbolic size."""
    rows, D, P = sp.symbols("rows D P", integer=True, positive=True)
    P = D if lab.broken else P  # halves that can be swapped
    Wx, We = sp.MatrixSymbol("Wx", rows, D), sp.MatrixSymbol("We", rows, P)
    x, e = sp.MatrixSymbol("x", D, 1), sp.MatrixSymbol("e", P, 1)
    product = sp.block_collapse(sp.BlockMatrix([[Wx, We]]) * sp.BlockMatrix([[x], [e]]))
    total = We * x + Wx * e if lab.broken else Wx * x + We * e
    return lab.exact("any size", product == sp.BlockMatrix([[total]]) or product == total, product=str(product))


def _split_engine(lab: Lab) -> Finding:
    """The query projection of a model of width D + P, applied once and in two halves."""
    D, P, n = 24, 24, 50
    generator = lab.torch_rng()
    linear = _query(build(_config(D + P, D), seed=lab.seed, dtype=torch.float64))
    x, e = torch.randn(2, n, D, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        together = linear(torch.cat([x, e], dim=-1))
        parts = linear.weight.split([D, P], dim=1)
        first, second = parts[::-1] if lab.broken else parts
        apart = x @ first.T + e @ second.T + linear.bias
        size = torch.cat([x, e], dim=-1).abs() @ linear.weight.abs().T + linear.bias.abs()
    worst = float(((together - apart).abs() / size).max())
    bound = 2 * gamma(D + P + 1)
    return lab.numerical("engine, one layer against two", worst, bound, D=D, P=P, inputs=n)


# ---------------------------------------------------------------- concat-vs-add


@claim("concat-vs-add")
def concat_vs_add(lab: Lab) -> Iterator[Finding]:
    """Under `broken` the two maps are tied, W_x = W_e, where the two are one and the same."""
    W, x, e = sp.Matrix(3, 2, sp.symbols("w:6")), sp.Matrix(sp.symbols("x:2")), sp.Matrix(sp.symbols("e:2"))
    tied = sp.expand(W * (x + e) - W.row_join(W) * x.col_join(e))
    yield lab.exact("addition is the case W_x = W_e", tied == sp.zeros(3, 1))
    w, shift = sp.symbols("w shift")
    found = sp.solve([w * shift - 1, w * (1 + shift) - (2 if lab.broken else 1)], [w, shift])
    yield lab.exact("[0 | 1], by elimination", not found, solutions=str(found))
    yield solve(lab, "[0 | 1] is no addition", lambda z3: impossible(z3, *_ignores_x(z3, 1 if lab.broken else 0)))
    yield solve(
        lab, "[1 | -1] is no addition of a fixed e", lambda z3: impossible(z3, *_fixed(z3, 1 if lab.broken else -1))
    )
    yield _absorbed(lab)
    yield _invertible(lab)
    yield _column_spaces(lab)
    yield from _engine(lab)


def _ignores_x(z3: Any, weight: int) -> tuple[Any, ...]:
    """w (x + e') = weight * x + e at e = 1 for x = 0 and x = 1."""
    w, shift = z3.Reals("w shift")
    return w * (0 + shift) == 1, w * (1 + shift) == weight + 1


def _fixed(z3: Any, sign: int) -> tuple[Any, ...]:
    """w (x + e) = x + sign * e for x = 0 and x = 1, with the same e, which is not 0."""
    w, e = z3.Reals("w e")
    return e != 0, w * (0 + e) == sign * e, w * (1 + e) == 1 + sign * e


def _absorbed(lab: Lab) -> Finding:
    """e' = W_x^-1 W_e e with an invertible matrix of symbolic size."""
    D, P = sp.symbols("D P", integer=True, positive=True)
    Wx, We = sp.MatrixSymbol("Wx", D, D), sp.MatrixSymbol("We", D, P)
    x, e = sp.MatrixSymbol("x", D, 1), sp.MatrixSymbol("e", P, 1)
    rest = sp.expand(Wx * (x + sp.Inverse(Wx) * We * e)) - (Wx * x + We * e)
    return lab.exact("e' = W_x^-1 W_e e", rest.doit() == sp.ZeroMatrix(D, 1))


def _invertible(lab: Lab) -> Finding:
    """e' = W_x^-1 W_e e for random whole-number matrices."""
    rng, wrong, cases = lab.rng(), 0, 40
    symbols = sp.Matrix(sp.symbols("e:3"))
    x = sp.Matrix(sp.symbols("x:3"))
    for _ in range(cases):
        Wx, We = sp.zeros(3, 3), sp.Matrix(rng.integers(-4, 5, (3, 3)).tolist())
        while Wx.det() == 0:
            Wx = sp.Matrix(rng.integers(-4, 5, (3, 3)).tolist())
        shift = Wx.inv() * We * symbols
        wrong += sp.expand(Wx * (x + shift) - Wx * x - We * symbols) != sp.zeros(3, 1)
    return lab.exhaustive("an invertible W_x can absorb e", wrong, cases, entries="-4..4", seed=lab.seed)


def rank(columns: Matrix) -> int:
    """Of 2 x n whole numbers, by minors: 2 if some 2 x 2 determinant is not 0, else 1 unless all entries are 0."""
    top, bottom = columns
    pairs = itertools.combinations(range(len(top)), 2)
    if any(top[i] * bottom[j] != top[j] * bottom[i] for i, j in pairs):
        return 2
    return 1 if any(top) or any(bottom) else 0


def absorbs(Wx: Matrix, column: tuple[int, ...]) -> bool:
    """Whether W_x e' = column has a solution, found by elimination in fractions."""
    _, pivots = DM([(*row, entry) for row, entry in zip(Wx, column, strict=True)], sp.QQ).rref()
    return len(Wx[0]) not in pivots  # no row of the reduced system says 0 = 1


def _column_spaces(lab: Lab) -> Finding:
    """All pairs of 2 x 2 matrices over {-1, 0, 1}; an addition works for all e iff it works for both unit vectors."""
    matrices = [((a, b), (d, e)) for a, b, d, e in itertools.product((-1, 0, 1), repeat=4)]
    solvable = {(Wx, col): absorbs(Wx, col) for Wx in matrices for col in itertools.product((-1, 0, 1), repeat=2)}
    wrong = possible = 0
    for Wx, We in itertools.product(matrices, repeat=2):
        works = all(solvable[Wx, (We[0][j], We[1][j])] for j in (0, 1))
        joined: Matrix = (Wx[0] + We[0], Wx[1] + We[1])
        wrong += works != (rank(joined) == rank(Wx))
        possible += works
    cases = len(matrices) ** 2
    return lab.exhaustive("possible iff col(W_e) lies in col(W_x)", wrong, cases, possible=possible, entries="-1, 0, 1")


def _engine(lab: Lab) -> Iterator[Finding]:
    """What our models do is the tied case, with the smaller count of weights."""
    D, T = 16, 20
    model = build(_config(D, D, c.Sinusoidal()), seed=lab.seed, dtype=torch.float64)
    tokens = torch.randint(0, 11, (1, T), generator=lab.torch_rng(1))
    seen = trace(model, tokens, sites=["blocks.0.attention.q"])["blocks.0.attention.q"][0, 0]
    q = _query(model)
    content = model.embed.tokens.weight[tokens[0]].detach()
    position = sinusoids(torch.arange(T), D, c.Sinusoidal())
    twice = torch.cat([q.weight, q.weight], dim=1).detach()
    concatenated = torch.cat([content, position], dim=-1) @ twice.T + q.bias.detach()
    size = torch.cat([content, position], dim=-1).abs() @ twice.abs().T
    worst = float(((seen - concatenated).abs() / size).max())
    yield lab.numerical("the engine adds: the tied case", worst, 2 * gamma(2 * D + 1), D=D, positions=T)
    wide = _query(build(_config(2 * D, D), device="meta")).weight
    yield lab.exact(
        "weights D_out (D + P) against D_out D",
        wide.numel() == D * (D + D) and q.weight.numel() == D * D,
        concatenated=f"{D} x ({D} + {D}) = {wide.numel()}",
        added=f"{D} x {D} = {q.weight.numel()}",
    )


@figure("concat-vs-add", "Concatenating a position can do more than adding it", height=3.4)
def draw(lab: Lab, fig: Figure) -> None:
    """Nested sets: what an added vector can do inside what a concatenated one can."""
    from matplotlib.patches import Ellipse

    ax = fig.canvas.subplots()
    ax.set(xlim=(0, 10), ylim=(0, 6), xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    rings = [
        ((5, 3.0), 9.6, 5.8, COLOURS[0], 0.10),
        ((4.2, 2.55), 7.2, 4.2, COLOURS[2], 0.16),
        ((3.4, 2.1), 4.6, 2.4, COLOURS[1], 0.22),
    ]
    for centre, width, height, colour, alpha in rings:
        ax.add_patch(Ellipse(centre, width, height, facecolor=colour, alpha=alpha, edgecolor="none"))
        ax.add_patch(Ellipse(centre, width, height, facecolor="none", edgecolor=colour, linewidth=1.2))
    ax.text(5.6, 5.2, r"$W_x x + W_e e$   (all)", ha="center", color=COLOURS[0])
    ax.text(4.3, 3.85, r"$W_x (x + e')$:  col$(W_e)\subseteq$ col$(W_x)$", ha="center", color="#006B4E")
    ax.text(3.4, 2.35, r"$W (x + e)$", ha="center", color="#A84300", fontsize=11)
    ax.text(3.4, 1.75, r"$W_x = W_e = W$", ha="center", color="#A84300")
    for x, y, label in ((8.75, 3.35, "[0 | 1]: only $e$"), (6.65, 2.6, "[1 | −1]: $e' = -e$")):
        ax.plot(x, y, "o", color="black", markersize=4)
        ax.annotate(label, (x, y), xytext=(0, -12), textcoords="offset points", ha="center", fontsize=8, color=GREY)
