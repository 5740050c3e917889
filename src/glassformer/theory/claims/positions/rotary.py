"""Rotary positions: scores that see offsets only."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import sympy as sp
import torch

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.lens.trace import Trace, trace
from glassformer.model import Model, build
from glassformer.model.transformer import n_parameters
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.positions.sinusoids import vanishes
from glassformer.theory.claims.positions.spectrum import off_toeplitz
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.small_models import one_layer

K, N = 16, 128
Q_SITE, K_SITE, V_SITE, SCORES = (f"blocks.0.attention.{name}" for name in ("q", "k", "v", "scores"))


def rotary_model(seed: int, pairing: str | None = "halves") -> Model:
    """One attention layer over equal tokens: q and k are the same at every position, up to their rotation."""
    cfg = one_layer(
        c.EncoderConfig,
        vocab_size=3,
        d_model=K,
        attention=c.Attention(1, scale=1.0),
        position=c.NoPosition() if pairing is None else c.Rotary(pairing=pairing),  # type: ignore[arg-type]
        placement="post",
        init_std=0.7,
    )
    return build(cfg, seed=seed, dtype=torch.float64)


def watch(model: Model, first: int = 0, keys_still: bool = False) -> Trace:
    """N equal tokens at positions `first` and on; with `keys_still` keys are not rotated."""
    tokens, positions = torch.zeros(1, N, dtype=torch.long), torch.arange(first, first + N)[None]
    edits: Any = None
    if keys_still:
        still = _projections(model)[1]
        edits = {K_SITE: lambda _site, value: torch.tensor(still).expand_as(value)}
    return trace(model, tokens, sites=[Q_SITE, K_SITE, V_SITE, SCORES], edits=edits, positions=positions)


def _projections(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """q and k of the token before any rotation."""
    attention: Any = model.blocks[0].attention
    with torch.no_grad():
        x = model.embed.tokens.weight[0]
        return attention.q(x).numpy(), attention.k(x).numpy()


def by_offset(q: np.ndarray, k: np.ndarray, pairing: str, sign: int = 1) -> np.ndarray:
    """q^T R_(sign (n-m) theta) k for queries m and keys n < N, in complex numbers: Re(conj(q) k e^(i angle))."""
    a, b = (slice(0, K // 2), slice(K // 2, K)) if pairing == "halves" else (slice(0, K, 2), slice(1, K, 2))
    product = np.conj(q[a] + 1j * q[b]) * (k[a] + 1j * k[b])
    theta = 10000.0 ** (-2 * np.arange(K // 2) / K)
    offset = np.arange(N)[None, :] - np.arange(N)[:, None]
    return (product * np.exp(1j * sign * offset[..., None] * theta)).sum(-1).real


@claim("rope-relative")
def rope_relative(lab: Lab) -> Iterator[Finding]:
    """Under `broken` queries are rotated and keys are not."""
    yield from _identity(lab)
    for pairing in ("interleaved", "halves"):
        yield from _engine(lab, pairing)
    halves, interleaved = (_scores(rotary_model(lab.seed, p)) for p in ("halves", "interleaved"))
    different = max_difference(halves, interleaved)
    yield lab.numerical("pairings are not interchangeable", different, None, low=1e-3)
    plain, rotary = n_parameters(rotary_model(0, None)), n_parameters(rotary_model(0))
    yield lab.exact("no parameters are added", plain == rotary, parameters=rotary)


def _scores(model: Model, **how: Any) -> np.ndarray:
    return watch(model, **how)[SCORES][0, 0].numpy()


def _identity(lab: Lab) -> Iterator[Finding]:
    m, n, theta = sp.symbols("m n theta", real=True)
    q, k = sp.Matrix(sp.symbols("q1 q2", real=True)), sp.Matrix(sp.symbols("k1 k2", real=True))

    def rotation(angle: Any) -> Any:
        return sp.Matrix([[sp.cos(angle), -sp.sin(angle)], [sp.sin(angle), sp.cos(angle)]])

    left = (rotation(m * theta) * q).dot(k if lab.broken else rotation(n * theta) * k)
    ours = left - q.dot(rotation((n - m) * theta) * k)
    yield lab.exact("score = q^T R_(n-m) k", vanishes(ours))
    printed = left - q.dot(rotation((m - n) * theta) * k)
    gap = 2 * (q[0] * k[1] - q[1] * k[0]) * sp.sin((m - n) * theta)
    yield lab.exact(
        "with R_(m-n) it is off by 2 (q1 k2 - q2 k1) sin((m-n) theta)",
        not vanishes(printed) and vanishes(printed - gap),
    )


def _engine(lab: Lab, pairing: str) -> Iterator[Finding]:
    model = rotary_model(lab.seed, pairing)
    q, k = _projections(model)
    size = float(np.linalg.norm(q) * np.linalg.norm(k))
    here, there = (_scores(model, first=first, keys_still=lab.broken) for first in (0, 1000))
    bound = 4 * (N - 1) * UNIT * size
    yield lab.numerical(f"{pairing}: Toeplitz", off_toeplitz(here), bound, positions=N, size=size)
    moved = max_difference(there, here)
    yield lab.numerical(f"{pairing}: moved by 1000", moved, 4 * (N + 999) * UNIT * size, positions="1000..1127")
    ours, printed = (max_difference(here, by_offset(q, k, pairing, sign)) for sign in (1, -1))
    yield lab.numerical(f"{pairing}: equals q^T R_(n-m) k", ours, bound)
    yield lab.numerical(f"{pairing}: differs from q^T R_(m-n) k", printed, None, low=1e-3)
    seen = watch(model)
    norms = [np.linalg.norm(seen[site][0, 0].numpy(), axis=1) / np.linalg.norm(v) for site, v in _named(q, k)]
    off = max_difference(np.concatenate(norms), 1)
    yield lab.numerical(f"{pairing}: norms kept", off, 8 * UNIT)
    values = seen[V_SITE][0, 0]
    same = bool((values == values[0]).all())
    yield lab.exact(f"{pairing}: values are not rotated", same)


def _named(q: np.ndarray, k: np.ndarray) -> list[tuple[str, np.ndarray]]:
    return [(Q_SITE, q), (K_SITE, k)]


@figure("rope-relative", "Rotary positions: one fixed q and k, scored at every offset", height=3.0)
def draw(lab: Lab, fig: Figure) -> None:
    model = rotary_model(lab.seed, "halves")
    q, k = _projections(model)
    scores = _scores(model)
    offsets = np.arange(-N // 2, N // 2 + 1)
    ax = fig.canvas.subplots()
    printed = by_offset(q, k, "halves", -1)
    queries = N // 2 - offsets // 2
    curve, wrong = scores[queries, queries + offsets], printed[queries, queries + offsets]
    ax.plot(offsets, wrong, color=GREY, linewidth=1, linestyle="--", label="with the sign of m − n (as printed)")
    ax.plot(offsets, curve, color=COLOURS[0], linewidth=1, label="score, one pair of positions per offset")
    for start, m, colour in ((0, 24, COLOURS[1]), (3, 64, COLOURS[2]), (6, 104, COLOURS[4])):
        shown = np.array([o for o in offsets[start::9] if 0 <= m + o < N])
        ax.plot(shown, scores[m, m + shown], "o", markersize=3.5, color=colour, label=f"from query m = {m}")
    ax.set(xlabel="offset n − m of the key", ylabel="score")
    ax.legend(ncols=2, columnspacing=1.2, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2)
