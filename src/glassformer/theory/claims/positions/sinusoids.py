"""Waves as positions: a shift is a rotation, half of the waves cannot shift, scores can see distances, the spectrum.

The tables come out of the engine: the embedding of a model with sinusoidal positions whose token table is zero.
"""

from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import sympy as sp
import torch

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.lens.trace import trace
from glassformer.model import build
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.small_models import one_layer

BASE = 10000.0


def engine_table(length: int, width: int, layout: str = "interleaved") -> np.ndarray:
    """PE[n], n < length, as our model adds it to its embeddings; float64."""
    cfg = one_layer(
        c.DecoderConfig,
        vocab_size=1,
        d_model=width,
        attention=c.Attention(1),
        position=c.Sinusoidal(layout=layout),  # type: ignore[arg-type]
    )
    model = build(cfg, dtype=torch.float64)
    with torch.no_grad():
        model.embed.tokens.weight.zero_()
    return trace(model, torch.zeros(1, length, dtype=torch.long), sites=["embed"])["embed"][0].numpy()


def frequencies(width: int) -> np.ndarray:
    """w_i = L^(-2i/D), one per pair."""
    return BASE ** (-2 * np.arange(width // 2) / width)


def shift_matrix(k: int, width: int) -> np.ndarray:
    """T_k: blocks [[cos k w_i, sin k w_i], [-sin k w_i, cos k w_i]] on the components (2i, 2i+1)."""
    T = np.zeros((width, width))
    even = np.arange(0, width, 2)
    cos, sin = np.cos(k * frequencies(width)), np.sin(k * frequencies(width))
    T[even, even], T[even + 1, even + 1], T[even, even + 1], T[even + 1, even] = cos, cos, sin, -sin
    return T


def one_based(length: int, width: int) -> np.ndarray:
    """Components i = 1..D by the same formula: sin at even i with L^(-i/D), cos at odd i with its left neighbour's."""
    i = np.arange(1, width + 1)
    angles = np.arange(length)[:, None] * BASE ** (-(i - i % 2) / width)
    return np.where(i % 2 == 0, np.sin(angles), np.cos(angles))


def best_linear(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """|before T - after| for the T that least squares finds."""
    fitted = np.linalg.lstsq(before, after, rcond=None)[0]
    return np.abs(before @ fitted - after)


def vanishes(expression: Any) -> bool:
    """Whether a polynomial in sines and cosines of sums of angles is 0, by writing them as exponentials."""
    return bool(sp.expand(sp.sympify(expression).rewrite(sp.exp)) == 0)


# ---------------------------------------------------------------- sinusoid-shift-rotation


def _block(angle: Any) -> Any:
    return sp.Matrix([[sp.cos(angle), sp.sin(angle)], [-sp.sin(angle), sp.cos(angle)]])


@claim("sinusoid-shift-rotation")
def shift_rotation(lab: Lab) -> Iterator[Finding]:
    """Under `broken` components are counted from 1, so the two of a block have different frequencies."""
    n, j, k, w, other = sp.symbols("n j k w w_next", real=True)
    pair = sp.Matrix([sp.sin(n * w), sp.cos(n * (other if lab.broken else w))])
    shifted = pair.subs(n, n + k)
    shifts = all(map(vanishes, _block(k * w) * pair - shifted))
    yield lab.exact("T_k PE[n] = PE[n+k]", shifts)
    one, both = _block(k * w), _block((j + k) * w)
    group = all(map(vanishes, _block(j * w) * one - both)) and _block(0) == sp.eye(2)
    orthogonal = all(map(vanishes, one * one.T - sp.eye(2))) and vanishes(one.det() - 1)
    yield lab.exact("T_j T_k = T_(j+k), T_0 = I, T_k orthogonal, det 1", group and orthogonal)
    first = np.tile([0.0, 1.0], 4)
    yield lab.numerical("the engine's first position is PE[0]", max_difference(engine_table(1, 8)[0], first), 0.0)
    yield from _shift_engine(lab)
    residual = best_linear(one_based(64, 8), one_based(67, 8)[3:]).max(axis=0)
    yield lab.numerical(
        "counted from 1, no linear map shifts",
        float(residual[0]),
        None,
        low=0.1,
        residuals=[float(f"{r:.3g}") for r in residual],
        D=8,
        k=3,
    )


def _shift_engine(lab: Lab) -> Iterator[Finding]:
    """max |T_k PE[n] - PE[n+k]| of the engine's table, in units of its bound."""
    D, n = 64, np.arange(512)
    for layout in ("interleaved", "halves"):
        table = one_based(612, D) if lab.broken else engine_table(612, D, layout)
        if layout == "halves" and not lab.broken:
            table = table.reshape(-1, 2, D // 2).swapaxes(1, 2).reshape(-1, D)  # sines first -> pairs
        worst = 0.0
        for k in (1, 7, 100):
            bound = 8 * UNIT * (1 + (n[:, None] + k) * np.repeat(frequencies(D), 2))
            worst = max(worst, float((np.abs(table[n] @ shift_matrix(k, D).T - table[n + k]) / bound).max()))
        yield lab.numerical(f"engine table, {layout}", worst, 1.0, D=D, n="0..511", k=[1, 7, 100])


@figure(
    "sinusoid-shift-rotation", "One pair of sinusoidal positions: k = {k:g} steps further is one rotation", height=3.2
)
def draw_helix(lab: Lab, fig: Figure) -> None:
    D, k, pair, last = 64, int(lab.knobs["k"]), 4, 60
    table = engine_table(last + k + 1, D)
    sin, cos = table[:, 2 * pair], table[:, 2 * pair + 1]
    n = np.arange(last + k + 1)
    grid = fig.canvas.add_gridspec(1, 2, width_ratios=[1.35, 1])
    space = fig.canvas.add_subplot(grid[0], projection="3d")
    space.plot(n, sin, cos, color=COLOURS[0], linewidth=1)
    space.scatter(n, sin, cos, color=COLOURS[0], s=4)
    for at in (2, 32):
        ends = [at, at + k]
        space.plot(n[ends], sin[ends], cos[ends], color=COLOURS[1], linewidth=1.2)
        space.scatter(n[ends], sin[ends], cos[ends], color=COLOURS[1], s=14)
    space.set(xlabel="position n", ylabel="sin")
    space.text2D(0.86, 0.74, "cos", transform=space.transAxes)
    space.set_yticks([-1, 0, 1])
    space.set_zticks([-1, 0, 1])
    space.view_init(elev=22, azim=-65)
    space.set_box_aspect((2.0, 1, 1), zoom=0.95)
    plane = fig.canvas.add_subplot(grid[1])
    plane.plot(sin, cos, ".", color=COLOURS[0], markersize=3)
    for at, colour in ((2, COLOURS[1]), (32, COLOURS[2])):
        for m in (at, at + k):
            plane.plot([0, sin[m]], [0, cos[m]], color=colour, linewidth=1)
            plane.annotate(f"{m}", (1.14 * sin[m], 1.14 * cos[m]), ha="center", va="center", fontsize=8)
    plane.set(xlim=(-1.35, 1.35), ylim=(-1.35, 1.35), aspect="equal", xlabel=f"sin(n w), pair {pair} of {D // 2}")
    plane.set_ylabel("cos(n w)")
    angle = k * frequencies(D)[pair]
    plane.set_title(f"angle k w = {angle:.2f} for every n", color=GREY)


# ---------------------------------------------------------------- sine-only-fails


@claim("sine-only-fails")
def sine_only(lab: Lab) -> Iterator[Finding]:
    """Under `broken` every sine is paired with its cosine, and a map exists."""
    w, v = sp.symbols("w v", positive=True)
    k = sp.Symbol("k", integer=True, positive=True)
    T = sp.Matrix(4, 4, sp.symbols("t:16"))
    waves = [f(angle) for angle in (w, v) for f in ((sp.sin, sp.cos) if lab.broken else (sp.sin,))]
    at = [sp.Matrix([f.func(m * f.args[0]) for f in waves]) for m in (0, k)]
    start = T[: len(waves), : len(waves)] * at[0]
    yield lab.exact(
        "T r_0 = 0 for every T, but r_k is not 0",
        start == sp.zeros(len(waves), 1) and at[1] != sp.zeros(len(waves), 1),
        r_0=str(list(at[0])),
        r_k=str(list(at[1])),
    )
    ratio = sp.sin(w) * sp.sin(3 * w) - sp.sin(2 * w) ** 2
    yield lab.exact("from position 1 on, one frequency", vanishes(ratio + sp.sin(w) ** 2))
    z = sp.symbols("z:4")
    vandermonde = sp.Matrix(4, 4, lambda i, j: z[j] ** i)
    gaps = sp.prod(z[j] - z[i] for i in range(4) for j in range(i + 1, 4))
    yield lab.exact(
        "waves of different frequencies are independent on the integers", sp.expand(vandermonde.det() - gaps) == 0
    )
    yield from _sine_only_numbers(lab)
    yield from _exceptions(lab)


def _sine_only_numbers(lab: Lab) -> Iterator[Finding]:
    D, k, n = 8, 3, np.arange(1, 64)
    table = engine_table(67, D)
    sines = table if lab.broken else table[:, 0::2]
    half = float(best_linear(sines[n], sines[n + k]).max())
    yield lab.numerical("sine only, best map over n = 1..63", half, None, low=0.1, D=D, k=k)
    both = float(best_linear(table[n], table[n + k]).max())
    yield lab.numerical("sine and cosine, the same", both, 1e-12, D=D, k=k)


def _exceptions(lab: Lab) -> Iterator[Finding]:
    """Where a map does exist."""
    n = sp.Symbol("n", integer=True)
    quarter = vanishes(sp.sin((n + 2) * sp.pi / 2) + sp.sin(n * sp.pi / 2))
    yield lab.exact("exception: sin(k w) = 0", quarter)
    with mpmath.workdps(60):
        w = [mpmath.mpf(10000) ** (-mpmath.mpf(2 * i) / 8) for i in range(4)]
        before = mpmath.matrix([[mpmath.sin(m * v) for v in w] for m in range(1, 5)])
        after = mpmath.matrix([[mpmath.sin((m + 3) * v) for v in w] for m in range(1, 5)])
        fitted = mpmath.inverse(before) * after
        left = float(mpmath.mnorm(before * fitted - after, mpmath.inf))
        size = float(abs(mpmath.det(before)))
    sines = engine_table(8, 8)[:, 0::2]
    floats = float(best_linear(sines[1:5], sines[4:8]).max())
    yield lab.numerical(
        "exception: as many positions as frequencies", left, 1e-40, determinant=size, float64_residual=floats
    )


@figure("sine-only-fails", "How far the best linear shift by k = 3 misses (D = 8)", height=3.0)
def draw_residual(lab: Lab, fig: Figure) -> None:
    D, k, longest = 8, 3, 64
    table = engine_table(longest + k + 1, D)
    counts = np.arange(2, longest + 1)

    def residuals(columns: np.ndarray) -> list[float]:
        return [max(best_linear(columns[1 : m + 1], columns[1 + k : m + 1 + k]).max(), 1e-16) for m in counts]

    ax = fig.canvas.subplots()
    ax.semilogy(counts, residuals(table[:, 0::2]), color=COLOURS[1])
    ax.semilogy(counts, residuals(table), color=COLOURS[0])
    ax.axvline(D // 2, color=GREY, linewidth=0.8, linestyle=":")
    ax.annotate("as many positions\nas frequencies", (D // 2 + 0.8, 1e-6), fontsize=8, color=GREY)
    ax.text(longest, 1.2, "sine only", ha="right", va="bottom", color=COLOURS[1])
    ax.text(longest, 1e-14, "sine and cosine", ha="right", va="bottom", color=COLOURS[0])
    ax.set(xlabel="positions 1..m that must fit", ylabel="largest error", ylim=(1e-17, 1e2))
