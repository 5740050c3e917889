"""What sinusoidal positions let a score see, and which frequencies they are made of."""

import zlib
from collections.abc import Iterator

import numpy as np
import sympy as sp
import torch

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import AMOUNT, Figure
from glassformer.lens.trace import trace
from glassformer.model import build
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.positions.sinusoids import BASE, engine_table, frequencies, shift_matrix, vanishes
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.small_models import one_layer

OFFSETS = (1, 2, 17)
HEAT_MAP = 0xD764D67C
"""Of the closed form with 40 digits; tests/theory/claims/positions/test_spectrum.py computes it."""


def off_toeplitz(scores: np.ndarray) -> float:
    """Largest difference between two scores of the same offset: 0 for a Toeplitz matrix."""
    n = len(scores)
    diagonals = [np.diagonal(scores, d) for d in range(-n + 1, n)]
    return float(max(d.max() - d.min() for d in diagonals))


def head_scores(width: int, length: int, query_map: np.ndarray, content: float, seed: int = 0) -> np.ndarray:
    """Scores (T,T) of one of our heads that reads token + position with the query map given and the identity for keys.

    RMSNorm divides a row of sines and cosines by the constant sqrt(1/2), so on positions alone it only scales. With
    `content` tokens are random vectors of that size, else zero.
    """
    cfg = one_layer(
        c.EncoderConfig,
        vocab_size=length,
        d_model=width,
        attention=c.Attention(1, bias=False, scale=0.5),
        norm=c.RMSNorm(eps=1e-30),
        position=c.Sinusoidal(),
    )
    model = build(cfg, seed=seed, dtype=torch.float64)
    attention = model.blocks[0].attention
    with torch.no_grad():
        model.embed.tokens.weight.mul_(content / cfg.init_std)
        attention.q.weight.copy_(torch.tensor(query_map))  # type: ignore[union-attr,operator]
        attention.k.weight.copy_(torch.eye(width))  # type: ignore[union-attr,operator]
    site = "blocks.0.attention.scores"
    return trace(model, torch.arange(length)[None], sites=[site])[site][0, 0].numpy()


# ---------------------------------------------------------------- sinusoid-relative-score


@claim("sinusoid-relative-score")
def relative_score(lab: Lab) -> Iterator[Finding]:
    """Under `broken` the query is rotated in the wrong direction, by T_k instead of T_-k."""
    p, q, k, w = sp.symbols("p q k w", real=True)
    position = sp.Matrix([sp.sin(p * w), sp.cos(p * w)])
    other = position.subs(p, q)
    rest = position.dot(other) - sp.cos((p - q) * w)
    yield lab.exact("PE[p].PE[q] of a pair", vanishes(rest))
    angle = (k if lab.broken else -k) * w
    rotated = sp.Matrix([[sp.cos(angle), sp.sin(angle)], [-sp.sin(angle), sp.cos(angle)]]) * position
    rest = rotated.dot(other) - sp.cos((p - k - q) * w)
    yield lab.exact("(T_-k PE[p]).PE[q] of a pair", vanishes(rest))
    irrational = bool((2 * sp.pi).is_irrational)
    yield lab.exact("only q = p - k reaches D/2", irrational and frequencies(64)[0] == 1)
    yield from _heads(lab)
    toeplitz = off_toeplitz(head_scores(64, 256, np.eye(64), content=0.0))
    bound = 8 * UNIT * 256 * 32
    yield lab.numerical("positions alone: Toeplitz", toeplitz, bound, D=64, length=256)
    crossed = off_toeplitz(head_scores(64, 256, np.eye(64), content=1.0, seed=lab.seed))
    yield lab.numerical("with content: not Toeplitz", crossed, None, low=1e-3, D=64, length=256)


def _heads(lab: Lab) -> Iterator[Finding]:
    """One head per offset, on the engine: the same weights look k back from every position."""
    D, n = 64, 256
    for k in OFFSETS:
        scores = head_scores(D, n, shift_matrix(k if lab.broken else -k, D), content=0.0)
        rows = np.arange(k, n)
        wrong = int((scores[rows].argmax(axis=1) != rows - k).sum())
        ranked = np.sort(scores[rows], axis=1)
        yield lab.exhaustive(
            f"a head looks {k} back",
            wrong,
            len(rows),
            best=float(ranked[:, -1].min()),
            runner_up=float(ranked[:, -2].max()),
        )
        margin = float((ranked[:, -1] - ranked[:, -2]).min())
        yield lab.numerical(f"margin at {k} back", margin, None, low=1.0, runner_up=30.9168)


@figure(
    "sinusoid-relative-score", "Scores between sinusoidal positions depend on the distance alone (D = 64)", height=3.5
)
def draw_scores(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_map

    D, n, k = 64, 96, int(lab.knobs["k"])
    axes = fig.canvas.subplots(1, 2, sharey=True)
    pictures = [("PE[p] · PE[q]", np.eye(D)), (f"query rotated back by k = {k}", shift_matrix(-k, D))]
    for ax, (title, query_map) in zip(axes, pictures, strict=True):
        scores = head_scores(D, n, query_map, content=0.0)
        image = draw_map(ax, scores, scores.min(), D / 2, colours=AMOUNT)
        ax.set(title=title, xlabel="key position q")
    axes[0].set_ylabel("query position p")
    fig.canvas.colorbar(image, ax=list(axes), shrink=0.85, label="score")


# ---------------------------------------------------------------- sinusoid-frequency-spectrum


@claim("sinusoid-frequency-spectrum")
def spectrum(lab: Lab) -> Iterator[Finding]:
    """Under `broken` the pairs are in another order."""
    i, D, L = sp.symbols("i D L", positive=True)
    period = 2 * sp.pi * L ** (2 * i / D)
    ratio = sp.simplify(period.subs(i, i + 1) / period - L ** (2 / D)) == 0
    ends = sp.simplify(period.subs(i, D / 2 - 1) - 2 * sp.pi * L ** (1 - 2 / D)) == 0
    yield lab.exact("periods are a geometric progression", ratio and ends and period.subs(i, 0) == 2 * sp.pi)
    yield from _columns(lab)


def _columns(lab: Lab) -> Iterator[Finding]:
    width, N = 64, 2048
    table = engine_table(N, width)
    sines = table[:, 0::2]
    if lab.broken:
        sines = sines[:, lab.rng().permutation(width // 2)]
    w = frequencies(width)
    resolved = np.flatnonzero(2 * np.pi / w <= N / 4)
    peaks = np.abs(np.fft.rfft(sines, axis=0))[1:].argmax(axis=0) + 1
    off = np.abs(peaks - N * w / (2 * np.pi))[resolved]
    yield lab.numerical(
        "spectral peak of each resolved column",
        float(off.max()),
        1.0,
        columns=len(resolved),
        longest_period=float(2 * np.pi / w[resolved[-1]]),
    )
    signs = np.sign(sines[1:])  # sin 0 = 0 has no sign
    crossings = (signs[1:] != signs[:-1]).sum(axis=0)
    rising = int((np.diff(crossings) > 0).sum())
    yield lab.exhaustive("sign changes never increase with i", rising, len(w) - 1, changes=[int(v) for v in crossings])
    miscounted = int((np.abs(crossings - np.floor((N - 1) * w / np.pi)) > 1).sum())
    yield lab.exhaustive("sign changes counted", miscounted, len(w), N=N, D=width)
    yield from _checksums(lab, table, w)


def _checksums(lab: Lab, table: np.ndarray, w: np.ndarray) -> Iterator[Finding]:
    """The heat map as numbers: column sums in closed form, and the picture to three decimals."""
    N = len(table)
    kernel = np.sin(N * w / 2) / np.sin(w / 2)
    closed = np.stack([kernel * np.sin((N - 1) * w / 2), kernel * np.cos((N - 1) * w / 2)], axis=1).ravel()
    off = max_difference(table.sum(axis=0), closed)
    bound = 8 * UNIT * N * N
    yield lab.numerical("column sums", off, bound, sum=float(table.sum()))
    checksum = zlib.crc32(np.round(1000 * table).astype("<i2").tobytes())
    yield lab.exact("heat map checksum", checksum == HEAT_MAP, checksum=f"{checksum:08x}")


@figure("sinusoid-frequency-spectrum", "Sinusoidal positions, D = {D:g}: fast waves left, slow ones right", height=3.8)
def draw_heat_map(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_map

    width, N = int(lab.knobs["D"]), int(lab.knobs["N"])
    table = engine_table(N, width)
    ax = fig.canvas.subplots()
    image = draw_map(ax, table, -1, 1, aspect="auto")
    ax.set(xlabel=f"component (sin at 2i, cos at 2i+1; period 2π·{BASE:.0f}^(2i/D))", ylabel="position")
    fig.canvas.colorbar(image, ax=ax, label="value")
