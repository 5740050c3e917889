"""A worked example of attention, in fractions, with thirty digits, and on the engine."""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import torch

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import Figure
from glassformer.lens.trace import Trace, trace
from glassformer.model import build
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.example import printed as doc
from glassformer.theory.claims.example.printed import PLAIN, SCALED, attention
from glassformer.theory.claims.registry import load_all
from glassformer.theory.claims.rounding import half_units, max_difference
from glassformer.theory.claims.small_models import one_layer

DATA = load_all()["worked-example-qkv"].data
"""Numbers of the statement: Q, K, V and S exactly, weights and outputs to seven digits."""


def engine(squared: Fraction, weights: tuple[doc.Matrix, doc.Matrix, doc.Matrix]) -> Trace:
    """The example on our model: its embeddings are the tokens' rows, which a post-norm block reads without a norm."""
    cfg = one_layer(
        c.EncoderConfig,
        vocab_size=3,
        d_model=4,
        attention=c.Attention(1, d_head=2, d_value=2, bias=False, scale=None if squared == SCALED else 1.0),
        placement="post",
    )
    model = build(cfg, dtype=torch.float64)
    layer: Any = model.blocks[0].attention
    with torch.no_grad():
        model.embed.tokens.weight.copy_(torch.from_numpy(_numbers(doc.INPUT)))
        for linear, weight in zip((layer.q, layer.k, layer.v), weights, strict=True):
            linear.weight.copy_(torch.from_numpy(_numbers(weight.T)))
    return trace(model, torch.arange(3)[None], sites=["blocks.0.attention.*"])


def _numbers(m: Any) -> np.ndarray:
    return np.array(m, dtype=np.float64)


# ---------------------------------------------------------------- worked-example-qkv


@claim("worked-example-qkv")
def worked_example(lab: Lab) -> Iterator[Finding]:
    """Under `broken` W_Q is as its printed matrix has it, with -1 for -1/2."""
    W_Q = doc.put(doc.W_Q, {(3, 1): -1}) if lab.broken else doc.W_Q
    found = {"Q": doc.INPUT * W_Q, "K": doc.K, "V": doc.V}
    found["S"] = found["Q"] * found["K"].T
    for name, value in found.items():
        shown = [[str(v) for v in row] for row in value.tolist()]
        yield lab.exact(f"{name} in fractions", value == doc.matrix(DATA[name]), value=shown)
    yield lab.exact("det S = 0", found["S"].det() == 0, printed=str(doc.PRINTED_S.det()))
    yield from _reconstruction(lab)
    yield from _digits(lab, found["S"])
    yield from _on_the_engine(lab, W_Q)
    yield from _document(lab)


def _reconstruction(lab: Lab) -> Iterator[Finding]:
    """Why this example and no other: the printed variants of W_Q, and the sign flips of the printed S."""
    entries, values = zip(*doc.W_Q_VARIANTS.items(), strict=True)
    variants = [doc.put(doc.W_Q, dict(zip(entries, chosen, strict=True))) for chosen in itertools.product(*values)]
    fitting = [w for w in variants if doc.INPUT * w == doc.PRINTED_Q]
    holds = fitting == [doc.W_Q]
    yield lab.exhaustive("W_Q is determined", int(not holds), len(variants), fitting=len(fitting))
    flips = [(i, j) for i in (1, 2, 3) for j in (1, 2, 3)]
    repaired = {at: doc.put(doc.PRINTED_S, {at: -doc.PRINTED_S[at[0] - 1, at[1] - 1]}) for at in flips}
    singular = [at for at, m in repaired.items() if m.det() == 0]
    holds = singular == [(1, 2)] and repaired[1, 2] == doc.S and doc.PRINTED_S.det() == Fraction(185, 8)
    yield lab.exhaustive("S is repaired by one sign", int(not holds), len(flips), singular=[list(a) for a in singular])


def _digits(lab: Lab, scores: doc.Matrix) -> Iterator[Finding]:
    for squared, name, stated in ((PLAIN, "without scaling", "plain"), (SCALED, "with 1/sqrt(2)", "scaled")):
        rows, out = attention(squared, scores)
        pairs = list(zip(itertools.chain(*rows), itertools.chain(*DATA[stated]["weights"]), strict=True))
        pairs += zip(itertools.chain(*out), itertools.chain(*DATA[stated]["outputs"]), strict=True)
        wrong = sum(half_units(float(value), text) > 1 for value, text in pairs)
        yield lab.exhaustive(
            f"weights and outputs {name}",
            wrong,
            len(pairs),
            weights=[[mpmath.nstr(v, 10) for v in row] for row in rows],
            output=[[mpmath.nstr(v, 10) for v in row] for row in out],
        )


def _on_the_engine(lab: Lab, W_Q: doc.Matrix) -> Iterator[Finding]:
    for squared, name in ((PLAIN, "without scaling"), (SCALED, "with 1/sqrt(2)")):
        seen = engine(squared, (W_Q, doc.W_K, doc.W_V))
        rows, out = attention(squared)
        factor = float(squared) ** 0.5
        expected = {
            "q": _numbers(doc.Q),
            "k": _numbers(doc.K),
            "v": _numbers(doc.V),
            "scores": _numbers(doc.S) * factor,
            "pattern": _numbers(rows),
            "heads": _numbers(out),
        }
        off = {
            site: max_difference(seen[f"blocks.0.attention.{site}"][0, 0].numpy(), value)
            for site, value in expected.items()
        }
        yield lab.numerical(f"engine {name}", max(off.values()), 1e-12, **off)


def _document(lab: Lab) -> Iterator[Finding]:
    """The lines as printed, and the list of inconsistencies."""
    lines = [
        {"entry": line.name, "as written": line.literal, "printed": line.printed, "correct": str(line.correct())}
        for line in doc.LINES
    ]
    wrong = sum(str(line.evaluate()) != line.literal for line in doc.LINES)
    inconsistent = sum(line.literal != line.printed for line in doc.LINES)
    yield lab.exhaustive("what the written lines add up to", wrong, len(lines), lines=lines, off=inconsistent)
    block = [str(v) for v in doc.S[:, :2]]
    struck = sum(
        literal == right or printed == right for (literal, printed), right in zip(doc.STRUCK, block, strict=True)
    )
    apart = sum(literal != printed for literal, printed in doc.STRUCK)
    yield lab.exhaustive("struck-out lines of Q K^T", struck, len(doc.STRUCK), printed_unlike_written=apart)
    slips = [
        {"n": n, "where": s.where, "printed": dict(s.printed), "correct": dict(s.correct)}
        for n, s in enumerate(doc.SLIPS, 1)
    ]
    unshown = sum(not s.shown() for s in doc.SLIPS)
    yield lab.exhaustive("18 inconsistencies", unshown + (len(slips) != 18), len(slips), slips=slips)
    yield _roundings(lab)


def _roundings(lab: Lab) -> Finding:
    """Where 1.17, 0.21 and the column-wise weights come from."""
    rows, _ = attention(PLAIN)
    coarse = doc.matrix(" ".join(f"{float(v):.2f}" for v in rows[2]))
    from_rounded = [str(float(v)) for v in coarse * doc.V]
    columns = attention(PLAIN, doc.S.T)[0]
    column = [f"{float(v):.4f}" for v in columns[0]]
    holds = from_rounded == ["1.17", "0.21"] and column == ["0.0009", "0.0000", "0.9991"]
    return lab.exact("where the printed outputs come from", holds, outputs=from_rounded, column_1=column)


@figure("worked-example-qkv", "The worked example: scores, weights, output (no scaling)", height=2.7)
def draw(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_attention, draw_map
    from glassformer.lens.figures.labels import settle, write_cells

    seen = engine(PLAIN, (doc.W_Q, doc.W_K, doc.W_V))
    parts = {name: seen[f"blocks.0.attention.{name}"][0, 0].numpy() for name in ("scores", "pattern", "heads")}
    titles = {"scores": "S = Q Kᵀ", "pattern": "A = softmax of rows", "heads": "Y = A V"}
    axes = fig.canvas.subplots(1, 3, width_ratios=[3, 3, 2.2])
    drawn = []
    for ax, (name, value) in zip(axes, parts.items(), strict=True):
        limit = float(np.abs(value).max())
        drawn.append(draw_attention(ax, value) if name == "pattern" else draw_map(ax, value, -limit, limit))
        ax.set_title(titles[name])
        columns = ["1", "2", "3"] if name != "heads" else ["1", "2"]
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(3), ["1", "2", "3"])
        ax.set_xlabel("component" if name == "heads" else "key token")
    axes[0].set_ylabel("query token")
    settle(fig)
    for ax, image, (name, value) in zip(axes, drawn, parts.items(), strict=True):
        write_cells(fig, ax, image, _texts(value, {"scores": "g", "pattern": ".4f", "heads": ".3f"}[name]))


def _texts(values: np.ndarray, form: str) -> list[list[str]]:
    """Return the values as texts; a positive value below 0.001 with its power of ten."""
    return [[f"{v:.1e}" if 0 < v < 1e-3 else f"{v:{form}}" for v in row] for row in values]


# ---------------------------------------------------------------- worked-example-pattern


@claim("worked-example-pattern")
def pattern(lab: Lab) -> Iterator[Finding]:
    """Under `broken` W_K is W_Q."""
    W_K = doc.W_Q if lab.broken else doc.W_K
    exact = doc.Q * (doc.INPUT * W_K).T
    scores = exact.tolist()
    winners = [row.index(max(row)) + 1 for row in scores]
    unique = all(row.count(max(row)) == 1 for row in scores)
    yield lab.exact("argmax of the rows is (3, 3, 1)", winners == [3, 3, 1] and unique, argmax=winners, ties=not unique)
    order = [[j for _, j in sorted((-v, j) for j, v in enumerate(row, 1))] for row in scores]
    second = scores[2][0] > scores[2][1] > scores[2][2] and scores[1][0] == scores[1][1]
    yield lab.exact("order of the scores", order[0] == [3, 1, 2] and order[2] == [1, 2, 3] and second)
    for squared, name, shares in (
        (PLAIN, "without scaling", "0.6225/0.3775"),
        (SCALED, "with 1/sqrt(2)", "0.5875/0.4125"),
    ):
        rows, _ = attention(squared, exact)
        diagonal = [float(rows[i][i]) for i in range(3)]
        yield lab.numerical(f"diagonal {name}", max(diagonal), 0.01, diagonal=diagonal)
        stated = f"{float(rows[2][0]):.4f}/{float(rows[2][1]):.4f}" == shares
        yield lab.exact(f"token 3 {name}", stated, shares=shares)
    yield _contrast(lab)


def _contrast(lab: Lab) -> Finding:
    """With W_K = W_Q and rows of equal norm every token attends most to itself: 100 of our models with QK-norm."""
    cases, wrong, T = 100, 0, 6
    cfg = one_layer(
        c.EncoderConfig,
        vocab_size=T,
        d_model=8,
        attention=c.Attention(1, bias=False, qk_norm=c.RMSNorm()),
        placement="post",
    )
    site = "blocks.0.attention.pattern"
    model, draw = build(cfg, dtype=torch.float64), lab.torch_rng()
    layer: Any = model.blocks[0].attention
    for _ in range(cases):
        with torch.no_grad():
            for weight in (model.embed.tokens.weight, layer.q.weight, layer.k.weight):
                weight.normal_(generator=draw)
            if not lab.broken:
                layer.k.weight.copy_(layer.q.weight)
        winners = trace(model, torch.arange(T)[None], sites=[site])[site][0, 0].argmax(-1)
        wrong += not bool((winners == torch.arange(T)).all())
    name = "contrast: W_K = W_Q, equal norms, the diagonal wins"
    return lab.exhaustive(name, wrong, cases, tokens=T, seed=lab.seed)


@figure("worked-example-pattern", "Who attends to whom: the figure that Q3c leaves out", width=5.4, height=2.9)
def draw_pattern(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_attention
    from glassformer.lens.figures.labels import settle, write_cells

    axes = fig.canvas.subplots(1, 2, sharey=True)
    drawn = []
    for ax, (squared, title) in zip(axes, ((PLAIN, "no scaling"), (SCALED, "scores / √2")), strict=True):
        value = engine(squared, (doc.W_Q, doc.W_K, doc.W_V))["blocks.0.attention.pattern"][0, 0].numpy()
        image = draw_attention(ax, value)
        drawn.append((ax, image, value))
        ax.set(title=title, xlabel="key token")
        ax.set_xticks(range(3), ["1", "2", "3"])
        ax.set_yticks(range(3), ["1", "2", "3"])
    axes[0].set_ylabel("query token")
    fig.canvas.colorbar(image, ax=list(axes), shrink=0.8, label="attention")
    settle(fig)
    for ax, image, value in drawn:
        write_cells(fig, ax, image, _texts(value, ".4f"))
