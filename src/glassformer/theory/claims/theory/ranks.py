"""What bounds the rank of attention: the number of tokens and the width of the values, not that of the keys."""

import math
from collections.abc import Iterator
from typing import Any

import sympy as sp
import torch
from torch import Tensor

from glassformer.finding import Finding
from glassformer.lens.figure import Figure
from glassformer.lens.rank import attention_spectra
from glassformer.model import NO_TAP
from glassformer.model.attention import Attention
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import half_units
from glassformer.theory.claims.theory.attend import NoSoftmax, attend, numerical_rank
from glassformer.theory.claims.weights.layer import layer

CASES = ((8, 2, 3, 1), (8, 2, 3, 2), (8, 2, 3, 4), (12, 1, 4, 2))
"""(n, d_k, d_v, H)."""
WIDTH = 16


@claim("attention-rank-bound")
def attention_rank_bound(lab: Lab) -> Iterator[Finding]:
    linear = lab.broken
    yield lab.exact("determinant of the counterexample", _determinant(linear))
    q = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    out = attend(q, q, torch.eye(2, dtype=torch.float64), linear=linear)
    yield lab.numerical(
        "the engine's determinant", half_units(float(torch.linalg.det(out)), "0.2310586"), 1, rank=numerical_rank(out)
    )
    sizes = range(2, 6)
    yield lab.exact(
        "full rank at d_k = 1 for n up to 5", all(_vandermonde(n, linear) for n in sizes), sizes=list(sizes)
    )
    wrong, cases = _linear_bound(lab)
    yield lab.exact("linear attention obeys min(n, d_k, d_v)", wrong == 0, cases=cases, wrong=wrong)
    grid = torch.linspace(-1.5, 1.5, 8, dtype=torch.float64)[:, None]
    full = attend(2 * grid, 2 * grid, torch.eye(8, dtype=torch.float64), linear=linear)
    yield lab.numerical(
        "rank 8 of 8 at d_k = 1", numerical_rank(full), 8, low=8, singular_values=torch.linalg.svdvals(full).tolist()
    )
    draw = torch.randn(3, 6, 2, generator=lab.torch_rng(), dtype=torch.float64)
    spectra = attention_spectra(draw[0], draw[1], draw[2])
    ranks = [int((s > 1e-12 * s[0]).sum()) for s in (spectra.scores, spectra.log_pattern, spectra.output)]
    yield lab.numerical("rank of ln A is d_k + 1", ranks[1], 3, low=3, scores=ranks[0], output=ranks[2])


def _determinant(linear: bool) -> bool:
    """Return det A of Q = K = (0, 1) in closed form; without softmax the matrix Q K^T replaces A."""
    q = sp.Matrix([0, 1])
    scores = q * q.T
    weights = scores.applyfunc(sp.exp)
    pattern = scores if linear else sp.Matrix(2, 2, lambda i, j: weights[i, j] / sum(weights[i, :]))
    det, e = pattern.det(), sp.E
    same = sp.simplify(det - (e - 1) / (2 * (e + 1))) == 0
    tanh = sp.simplify(((e - 1) / (2 * (e + 1)) - sp.tanh(sp.Rational(1, 2)) / 2).rewrite(sp.exp)) == 0
    return bool(same and tanh)


def _vandermonde(n: int, linear: bool) -> bool:
    x = sp.Symbol("x")
    kernel = sp.Matrix(n, n, lambda i, j: i * j if linear else x ** (i * j))
    product = sp.prod(x**j - x**i for i in range(n) for j in range(i + 1, n))
    matches = sp.expand(kernel.det() - product) == 0
    return matches and bool(sp.N(product.subs(x, sp.E)) > 0)


def _linear_bound(lab: Lab) -> tuple[int, int]:
    """How many of 50 random whole-number cases exceed min(n, d_k, d_v); the rank is exact."""
    rng, wrong, cases = lab.rng(1), 0, 50
    for _ in range(cases):
        n, d_k, d_v = (int(size) for size in rng.integers(1, 6, 3))
        q, k = (sp.Matrix(rng.integers(-4, 5, (n, d_k)).tolist()) for _ in range(2))
        v = sp.Matrix(rng.integers(-4, 5, (n, d_v)).tolist())
        wrong += (q * k.T * v).rank() > min(n, d_k, d_v)
    return wrong, cases


@figure("attention-rank-bound", "Singular values at d_k = 1, n = 8")
def draw_rank(lab: Lab, fig: Figure) -> None:
    grid = torch.linspace(-3, 3, 8, dtype=torch.float64)[:, None]
    spectra = attention_spectra(grid, grid, torch.eye(8, dtype=torch.float64))
    ax = fig.canvas.subplots()
    index = range(1, 9)
    shown = {"A = softmax(QKᵀ): rank 8": spectra.pattern, "QKᵀ: rank 1": spectra.scores}
    shown["ln A: rank 2"] = spectra.log_pattern
    for (label, sigma), marker in zip(shown.items(), "os^", strict=True):
        ax.plot(index, (sigma / sigma[0]).clamp(min=1e-18), marker + "-", label=label)
    ax.axhspan(1e-18, 1e-15, color="black", alpha=0.07, linewidth=0)
    ax.text(8.3, 2e-15, "below: rounding of float64", ha="right", va="bottom", fontsize=8)
    ax.set_yscale("log")
    ax.set_ylim(1e-18, 3)
    ax.set_xlabel("index")
    ax.set_ylabel("singular value over the largest")
    ax.legend(loc="center right")


@claim("multihead-rank-bound")
def multihead_rank_bound(lab: Lab) -> Iterator[Finding]:
    softmax = {case: _layer_rank(lab, case, linear=False) for case in CASES}
    yield lab.numerical(
        "softmax: min(n, H d_v, d), attained",
        sum(rank != wanted for rank, wanted in zip(softmax.values(), (3, 6, 8, 8), strict=True)),
        0,
        ranks={str(case): rank for case, rank in softmax.items()},
    )
    linear = {case: _exact_linear_rank(lab, case) for case in CASES}
    yield lab.exact(
        "linear: min(n, H min(d_k, d_v), d), attained",
        list(linear.values()) == [2, 4, 8, 2],
        ranks={str(case): rank for case, rank in linear.items()},
    )
    engine = {case: _layer_rank(lab, case, linear=True) for case in CASES}
    yield lab.numerical(
        "the engine without softmax agrees",
        sum(engine[case] != linear[case] for case in CASES),
        0,
        ranks={str(case): rank for case, rank in engine.items()},
    )
    above = sum(softmax[case] > min(case[0], case[3] * case[2], WIDTH) for case in CASES)
    above += sum(linear[case] > min(case[0], case[3] * min(case[1:3]), WIDTH) for case in CASES)
    yield lab.exact("no rank above its bound", above == 0)
    one, four = _rank_one_input(lab)
    yield lab.numerical("rank-one X: one head keeps it at 1", one, 1, low=1)
    yield lab.numerical("rank-one X: four heads make 4", four, 4, low=4)


def integer_layer(lab: Lab, case: tuple[int, int, int, int]) -> Attention:
    """The engine's attention layer with whole-number weights. Broken: every head is a copy of the first."""
    _, d_k, d_v, heads = case
    rng, widths = lab.torch_rng(heads + 10 * d_k), (d_k, d_k, d_v)
    q, k, v = (torch.randint(-2, 3, (heads * width, WIDTH), generator=rng) for width in widths)
    o = torch.randint(-2, 3, (WIDTH, heads * d_v), generator=rng)
    if lab.broken:
        q, k, v = (w[:width].repeat(heads, 1) for w, width in zip((q, k, v), widths, strict=True))
    q, k, v, o = (w.T.double() for w in (q, k, v, o))
    return layer(q, k, v, o, heads, scale=1 / 16)


def _input(lab: Lab, n: int) -> Tensor:
    return torch.randint(-1, 2, (n, WIDTH), generator=lab.torch_rng(7)).to(torch.float64)


def _run(attention: Attention, x: Tensor, linear: bool) -> Tensor:
    with torch.no_grad():
        return attention(x[None], tap=NoSoftmax() if linear else NO_TAP)[0]


def _layer_rank(lab: Lab, case: tuple[int, int, int, int], linear: bool) -> int:
    return numerical_rank(_run(integer_layer(lab, case), _input(lab, case[0]), linear))


def _exact_linear_rank(lab: Lab, case: tuple[int, int, int, int]) -> int:
    """Rank of sum_h (Q_h K_h^T) V_h W_h over the whole numbers; the factor 1/16 does not change a rank."""
    n, d_k, d_v, heads = case
    attention = integer_layer(lab, case)

    def whole(x: Tensor) -> Any:
        return sp.Matrix(x.detach().to(torch.int64).tolist())

    x, out = whole(_input(lab, n)), sp.zeros(n, WIDTH)
    q, k, v, o = (whole(m.weight) for m in (attention.q, attention.k, attention.v, attention.o))
    for h in range(heads):
        rows, values = slice(h * d_k, (h + 1) * d_k), slice(h * d_v, (h + 1) * d_v)
        out += (x * q[rows, :].T) * (x * k[rows, :].T).T * (x * v[values, :].T) * o[:, values].T
    return int(out.rank())


def _rank_one_input(lab: Lab) -> tuple[int, int]:
    """Rank of the output for X = u w^T with one head and with four."""
    rng = lab.torch_rng(3)
    u = torch.arange(1, 9, dtype=torch.float64)[:, None] / 4
    x = u * torch.randint(1, 4, (1, WIDTH), generator=rng)
    ranks = [numerical_rank(_run(integer_layer(lab, (8, 2, 3, heads)), x, False), 1e-9) for heads in (1, 4)]
    return ranks[0], ranks[1]


@figure("multihead-rank-bound", f"Rank of a layer's output: n = 12, d_k = 1, d_v = 2, d = {WIDTH}")
def draw_multihead(lab: Lab, fig: Figure) -> None:
    heads, n, d_k, d_v = range(1, 9), 12, 1, 2
    ax = fig.canvas.subplots()
    for linear, marker, label in ((False, "o", "softmax"), (True, "s", "linear")):
        measured = [_layer_rank(lab, (n, d_k, d_v, h), linear) for h in heads]
        bound = [min(n, h * (min(d_k, d_v) if linear else d_v), WIDTH) for h in heads]
        [line] = ax.plot(heads, bound, "--", linewidth=1, label=f"{label}: bound")
        ax.plot(heads, measured, marker, color=line.get_color(), label=f"{label}: measured")
    ax.set_xlabel("heads H")
    ax.set_ylabel("rank")
    ax.set_ylim(0, math.ceil(n * 1.1))
    ax.legend(loc="upper left")
