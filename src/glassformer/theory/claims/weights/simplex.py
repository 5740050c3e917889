"""Weights that are not negative and sum to 1: what follows from it, that softmax makes such weights, and how safely."""

import math
from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import sympy
import torch

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens import trace
from glassformer.lens.figure import COLOURS, Figure
from glassformer.model import build
from glassformer.theory.claims.claim import Lab, claim, figure, impossible, possible, solve
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.small_models import refusal
from glassformer.theory.claims.weights.layer import normal, shape, softmax_of

SIZES = range(1, 9)
FLOAT32_LIMIT = 88.7229
"""exp of anything above it overflows float32."""


@claim("convex-weights-upper-bound")
def convex_weights(lab: Lab) -> Iterator[Finding]:
    signed = lab.broken

    def weights(z3: Any, n: int) -> tuple[list[Any], Any, list[Any]]:
        """n weights, that they sum to 1, that none is negative."""
        a = z3.Reals(" ".join(f"a{m}" for m in range(n)))
        return a, z3.Sum(a) == 1, [] if signed else [x >= 0 for x in a]

    def none_above_one(z3: Any) -> bool:
        def holds(a: list[Any], total: Any, signs: list[Any]) -> bool:
            return impossible(z3, total, *signs, z3.Or([x > 1 for x in a]))

        return all(holds(*weights(z3, n)) for n in SIZES)

    def needs_the_sign(z3: Any) -> bool:
        found = []
        for n in SIZES:
            a, total, _ = weights(z3, n)
            found.append(possible(z3, total, z3.Or([x > 1 for x in a])))
        return found == [n > 1 for n in SIZES]

    def one_iff_others_zero(z3: Any) -> bool:
        def holds(a: list[Any], total: Any, signs: list[Any]) -> bool:
            return impossible(z3, total, *signs, (a[0] == 1) != z3.And([x == 0 for x in a[1:]]))

        return all(holds(*weights(z3, n)) for n in SIZES)

    yield solve(lab, "no weight above 1", none_above_one, sizes=list(SIZES))
    yield solve(lab, "sign needed", needs_the_sign)
    yield solve(lab, "equality", one_iff_others_zero)
    yield solve(lab, "any N", lambda z3: _any_size(z3, signed))
    yield _certificate(lab, 8)


def _any_size(z3: Any, signed: bool) -> bool:
    """A sum of non-negative numbers is non-negative, and 0 only if each is: the induction step, and what it gives."""
    weight, others, last = z3.Reals("weight others last")
    signs = [] if signed else [others >= 0, last >= 0, weight >= 0]
    step = z3.And(others + last >= 0, z3.Implies(others + last == 0, z3.And(others == 0, last == 0)))
    result = z3.And(weight <= 1, (weight == 1) == (others == 0))
    return impossible(z3, *signs, z3.Not(step)) and impossible(z3, *signs, weight + others == 1, z3.Not(result))


def _certificate(lab: Lab, n: int) -> Finding:
    """Maximise a_k: the multiplier of the sum is 1, that of a_m >= 0 is 1 for m != k and 0 for k."""
    a = sympy.symbols(f"a0:{n}")
    holds = True
    for k in range(n):
        slack = [0 if m == k or lab.broken else 1 for m in range(n)]
        bound = 1 * sum(a) - sum(mu * x for mu, x in zip(slack, a, strict=True))
        stationary = all(int(m == k) - 1 + slack[m] == 0 for m in range(n))
        holds &= sympy.expand(bound - a[k]) == 0 and stationary and slack[k] == 0
    return lab.exact("dual certificate", holds, weights=n, multiplier=1)


@figure("convex-weights-upper-bound", "Weights that are not negative and sum to 1", height=3.9)
def draw_simplex(lab: Lab, fig: Figure) -> None:
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])
    steps = 60
    grid = np.array([(i, j, steps - i - j) for i in range(steps + 1) for j in range(steps + 1 - i)]) / steps
    points = grid @ corners
    ax = fig.canvas.subplots()
    shown = ax.tricontourf(points[:, 0], points[:, 1], grid.max(axis=1), levels=np.linspace(1 / 3, 1, 13))
    ax.add_patch(_polygon(corners))
    for k, (corner, at) in enumerate(zip(corners, ((-0.02, -0.06), (1.02, -0.06), (0.5, 0.91)), strict=True)):
        ax.plot(*corner, "o", color=COLOURS[1], clip_on=False)
        ax.text(*at, f"$a_{k + 1} = 1$", ha="center", va="bottom" if k == 2 else "top")
    ax.text(0.5, -0.03, "$a_3 = 0$", ha="center", va="top")
    ax.text(0.79, 0.46, "$a_1 = 0$", rotation=-60, ha="center", va="center")
    ax.text(0.21, 0.46, "$a_2 = 0$", rotation=60, ha="center", va="center")
    ax.set(aspect="equal", xlim=(-0.15, 1.15), ylim=(-0.13, 1.0))
    ax.axis("off")
    fig.canvas.colorbar(shown, ax=ax, label="largest weight", ticks=[1 / 3, 0.5, 0.75, 1], format="%.2f", shrink=0.8)


def _polygon(corners: np.ndarray) -> Any:
    from matplotlib.patches import Polygon

    return Polygon(corners, closed=True, fill=False, edgecolor="black", linewidth=1.2)


@claim("softmax-row-stochastic")
def softmax_rows(lab: Lab) -> Iterator[Finding]:
    wrong_axis = lab.broken
    yield solve(lab, "three keys", lambda z3: _three_keys(z3, wrong_axis), keys=3)
    yield solve(lab, "any number of keys", _any_keys)
    yield solve(lab, "masked", _masked)
    yield from (_row_sums(lab, fused, wrong_axis) for fused in (False, True))
    yield from _ends(lab)


def _row_sums(lab: Lab, fused: bool, wrong_axis: bool) -> Finding:
    """Compare the model's row sums with their bound 2 N u; a weight outside [0,1] counts as infinitely far."""
    table, worst = [], 0.0
    for n in (1, 2, 17, 1000):
        for spread in (1, 50):
            scores = spread * normal(lab.torch_rng(n), 8, n)
            pattern = softmax_of(scores.T, fused=fused).T if wrong_axis else softmax_of(scores, fused=fused)
            off = max(abs(math.fsum(row) - 1) for row in pattern.tolist())
            outside = bool(pattern.min() < 0 or pattern.max() > 1)
            worst = max(worst, math.inf if outside else off / (2 * n * UNIT))
            table.append([n, spread, off])
    return lab.numerical(
        f"row sums, {'fused' if fused else 'explicit'} path", worst, 1.0, keys_spread_deviation=table, rows=8
    )


def _three_keys(z3: Any, wrong_axis: bool) -> bool:
    t = z3.Reals("t0 t1 t2")
    # normalised over queries, every key has a denominator of its own
    sums = z3.Reals("d0 d1 d2") if wrong_axis else [z3.Sum(t)] * 3
    weights = [x / d for x, d in zip(t, sums, strict=True)]
    bad = z3.Or(z3.Sum(weights) != 1, *[w <= 0 for w in weights], *[w >= 1 for w in weights])
    return impossible(z3, *[x > 0 for x in t], *[d > x for x, d in zip(t, sums, strict=True)], bad)


def _any_keys(z3: Any) -> bool:
    t, rest = z3.Reals("t rest")
    return impossible(z3, t > 0, rest > 0, z3.Or(t / (t + rest) <= 0, t / (t + rest) >= 1))


def _masked(z3: Any) -> bool:
    hidden, seen, rest = z3.Reals("hidden seen rest")
    total = hidden + seen + rest
    wrong = z3.Or(hidden / total != 0, hidden / total + seen / total + rest / total != 1)
    return impossible(z3, hidden == 0, seen > 0, rest >= 0, wrong)


def _ends(lab: Lab) -> Iterator[Finding]:
    """Where float64 reaches the ends of the interval, and rows in which nothing is left to attend to."""
    far = softmax_of(torch.tensor([[0.0, -1000.0]], dtype=torch.float64))[0].tolist()
    yield lab.numerical("end points in float64", abs(far[0] - 1) + abs(far[1]), 0.0, weights=far)
    scores, mask = normal(lab.torch_rng(7), 6, 9), torch.rand(6, 9, generator=lab.torch_rng(8)) < 0.5
    mask[:, 0] = True
    pattern = softmax_of(scores, mask)
    leak = float(pattern[~mask].abs().max())
    off = max(abs(math.fsum(row) - 1) for row in pattern.tolist())
    yield lab.numerical("masked weights", leak + max(0.0, off - 2 * 9 * UNIT), 0.0, hidden=int((~mask).sum()))
    mask[3] = False
    empty = softmax_of(scores, mask)[3]
    yield lab.numerical("all masked is NaN", float((~empty.isnan()).sum()), 0.0, keys=9)
    yield from _empty_rows_of_models(lab)


def _empty_rows_of_models(lab: Lab) -> Iterator[Finding]:
    model = build(shape(8, 2, 4, 4), seed=lab.seed, dtype=torch.float64)
    mask = torch.ones(1, 5, 5, dtype=torch.bool)
    mask[0, 2] = False
    seen = trace(model, [[0] * 5], sites=["blocks.0.attention.pattern"], mask=mask)["blocks.0.attention.pattern"]
    alone = torch.eye(5, dtype=torch.float64)[2]
    yield lab.numerical("empty row of a model", max_difference(seen[0, :, 2], alone), 0.0)
    pair = c.Seq2SeqConfig(
        vocab_size=3, d_model=8, n_layers=1, n_encoder_layers=1, attention=c.Attention(n_heads=2),
        feedforward=c.Dense(d_ff=8), position=c.NoPosition(),
    )  # fmt: skip
    source = torch.zeros(1, 4, dtype=torch.long)
    error = refusal(build(pair, seed=lab.seed), source, source, source_mask=torch.zeros(1, 4, dtype=torch.bool))
    yield lab.exact("cross-attention over padding", bool(error))


@figure("softmax-row-stochastic", "Softmax of one row of scores", height=2.8)
def draw_temperatures(lab: Lab, fig: Figure) -> None:
    scores = torch.tensor([[2.0, 1.0, 0.5, -0.5, -2.0]], dtype=torch.float64)
    own = lab.knobs["temperature"]
    axes = fig.canvas.subplots(1, 3, sharey=True)
    for ax, temperature, colour in zip(axes, (0.2, own, 5.0), COLOURS, strict=False):
        weights = softmax_of(scores / temperature)[0].tolist()
        bars = ax.bar(range(len(weights)), weights, color=colour)
        ax.bar_label(bars, [f"{w:.2f}" for w in weights], fontsize=7, padding=1)
        ax.set(title=f"temperature {temperature:g}", xlabel="score", ylim=(0, 1.12))
        ax.set_xticks(range(len(weights)), [f"{s:g}" for s in scores[0].tolist()])
    axes[0].set_ylabel("weight")


@claim("softmax-shift-invariance")
def shift_invariance(lab: Lab) -> Iterator[Finding]:
    yield _shifted_identity(lab)
    generator = lab.torch_rng()
    scores = torch.randint(-(2**12), 2**12, (16, 32), generator=generator).double() / 2**10
    shift = torch.randint(-500, 500, (16, 1), generator=generator).double()
    if lab.broken:
        shift = torch.randint(-500, 500, (16, 32), generator=generator).double()
    moved = float((softmax_of(scores + shift) - softmax_of(scores)).abs().max())
    yield lab.numerical("engine, shifted", moved, 0.0, rows=16, keys=32)
    for dtype in (torch.float32, torch.float64):
        large = (1e4 * (2 * torch.rand(64, 32, generator=generator, dtype=torch.float64) - 1)).to(dtype)
        large[0, :2] = torch.tensor([1e4, -1e4], dtype=dtype)
        naive = large.exp() / large.exp().sum(-1, keepdim=True)
        pattern = naive if lab.broken else softmax_of(large)
        name = str(dtype).removeprefix("torch.")
        lost = float((~pattern.isfinite()).sum())
        yield lab.numerical(f"scores up to 1e4, {name}", lost, 0.0, rows=64, keys=32)
        overflown = float((~naive.isfinite()).any(-1).sum())
        yield lab.numerical(f"naive form overflows, {name}", overflown, None, low=1.0, rows=64)
    with np.errstate(over="ignore"):
        limit = bool(np.isfinite(np.exp(np.float32(88.7228))) and np.isinf(np.exp(np.float32(FLOAT32_LIMIT))))
    yield lab.exact("limit in float32", limit, overflows_at=FLOAT32_LIMIT)
    yield _against_digits(lab)


def _shifted_identity(lab: Lab) -> Finding:
    s = sympy.symbols("s0:3", real=True)
    c = sympy.symbols("c0:3", real=True) if lab.broken else (sympy.Symbol("c", real=True),) * 3
    plain, moved = ([sympy.exp(x) for x in row] for row in (s, [x + d for x, d in zip(s, c, strict=True)]))
    gaps = [sympy.simplify(m / sum(moved) - p / sum(plain)) for m, p in zip(moved, plain, strict=True)]
    # any number of keys: the others enter through the sum of their exponentials alone, which takes the factor e^c too
    t, rest, factor = sympy.symbols("t rest factor", positive=True)
    gaps.append(sympy.simplify(factor * t / (factor * t + (rest if lab.broken else factor * rest)) - t / (t + rest)))
    return lab.exact("identity", all(g == 0 for g in gaps), symbols=3)


def _against_digits(lab: Lab) -> Finding:
    """Compare the model's weights with 50-digit ones; exp amplifies the rounding of the subtraction."""
    rng, n = lab.rng(), 24
    worst = 0.0
    for span in (1.0, 50.0, 1e4):
        scores = span * (2 * rng.random((4, n)) - 1)
        found = torch.from_numpy(scores)
        found = found.exp() / found.exp().sum(-1, keepdim=True) if lab.broken else softmax_of(found)
        with mpmath.workdps(50):
            for row, got in zip(scores.tolist(), found.tolist(), strict=True):
                terms = [mpmath.exp(mpmath.mpf(s)) for s in row]
                total = mpmath.fsum(terms)
                for s, term, p in zip(row, terms, got, strict=True):
                    if not math.isfinite(p):
                        worst = math.inf
                        continue
                    allowed = (8 + n + 2 * abs(s - max(row))) * UNIT * term / total + mpmath.mpf(10) ** -300
                    worst = max(worst, float(abs(mpmath.mpf(p) - term / total) / allowed))
    return lab.numerical("against 50 digits", worst, 1.0, keys=n, rows=12)
