"""Attention does not know the order of its tokens; positions or a mask provide it."""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import sympy
import torch

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import Figure
from glassformer.model import EncoderLM, Model, build
from glassformer.model.positions import sinusoids
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import UNIT, max_difference
from glassformer.theory.claims.weights.layer import normal, random_layer, run
from glassformer.theory.claims.weights.rational import (
    Matrix,
    causal,
    multihead,
    random_heads,
    random_matrix,
    rational,
    weights,
)

TOKENS = 5
ORDERS = list(itertools.permutations(range(TOKENS)))
"""All 120 permutations. `sigma` moves token sigma(i) to position i: (P X)_i = x_sigma(i)."""
DOG, BITES, MAN = 0, 1, 2
SENTENCES = {"dog bites man": [DOG, BITES, MAN], "man bites dog": [MAN, BITES, DOG]}


@claim("permutation-equivariance")
def permutation_equivariance(lab: Lab) -> Iterator[Finding]:
    rng = lab.rng()
    x, heads = random_matrix(rng, TOKENS, 3), random_heads(rng, 2, 3, 2)
    allowed = causal(TOKENS) if lab.broken else None
    wrong = len(ORDERS) - _followers(x, heads, allowed)
    yield lab.exhaustive("every order of five tokens", wrong, len(ORDERS))
    q, k, v = (random_matrix(rng, TOKENS, 2) for _ in range(3))
    y = weights(q, k) @ v
    wrong = sum(bool((weights(q[list(s)], k) @ v != y[list(s)]).any()) for s in ORDERS)
    wrong += sum(bool((weights(q, k[list(s)]) @ v[list(s)] != y).any()) for s in ORDERS)
    yield lab.exhaustive("queries, keys and values apart", wrong, 2 * len(ORDERS))
    yield _any_size(lab)
    yield _engine_layer(lab)
    yield _engine_stack(lab)
    yield from _controls(lab, x, heads)


def _followers(x: Matrix, heads: Any, allowed: Any = None, positions: Matrix | int = 0) -> int:
    """For how many orders patterns and output follow the tokens; `positions` are vectors added by position."""
    patterns, out = multihead(x + positions, heads, allowed)

    def follows(order: list[int]) -> bool:
        moved, moved_out = multihead(x[order] + positions, heads, allowed)
        same = all((b == a[np.ix_(order, order)]).all() for a, b in zip(patterns, moved, strict=True))
        return bool(same and (moved_out == out[order]).all())

    return sum(follows(list(order)) for order in ORDERS)


def _any_size(lab: Lab) -> Finding:
    """Swap two tokens a and b; the others enter a row only through their sums. Swaps generate every permutation."""
    t = {row + key: sympy.Symbol(f"t_{row}{key}", positive=True) for row in "iab" for key in "ab"}
    v = {key: sympy.Symbol(f"v_{key}") for key in "ab"}
    rest = {row: sympy.symbols(f"sum_{row} mix_{row}") for row in "iab"}

    def output(row: str, order: str) -> Any:
        """Row of the token `row`, its keys visited in the given order; under the control it sees itself and before."""
        seen = order[: order.index(row) + 1] if lab.broken and row in order else order
        above = rest[row][1] + sum(t[row + key] * v[key] for key in seen)
        return above / (rest[row][0] + sum(t[row + key] for key in seen))

    holds = all(sympy.simplify(output(row, "ab") - output(row, "ba")) == 0 for row in "iab")
    return lab.exact("any number of tokens, any kernel", holds)


def _engine_layer(lab: Lab) -> Finding:
    """Float64, per head, against the derived tolerance."""
    worst = 0.0
    for n in (1, 2, 8, 33):
        generator = lab.torch_rng(n)
        attention, x = random_layer(generator, 12, 2, 6, 6), normal(generator, n, 12)
        seen = run(attention, x, causal=lab.broken)
        q, k, v = seen["q"], seen["k"], seen["v"]
        exponents = (q.abs() @ k.abs().transpose(1, 2) / math.sqrt(6)).amax((1, 2), keepdim=True)
        bound = UNIT * v.abs().amax((1, 2), keepdim=True) * (4 * n + 4 * (6 + 2) * exponents)
        for _ in range(20):
            order = torch.randperm(n, generator=generator)
            moved = run(attention, x[order], causal=lab.broken)["heads"]
            worst = max(worst, float(((moved - seen["heads"][:, order]).abs() / bound).max()))
    return lab.numerical("engine, layer", worst, 1.0, tokens=[1, 2, 8, 33], orders=20)


def _stack(position: Any, kind: type[c.ModelConfig] = c.EncoderConfig, seed: int = 0) -> Model:
    """Two whole blocks (norms, residuals, feed-forward), with weights large enough that everything matters."""
    config = kind(
        vocab_size=11, d_model=8, n_layers=2, attention=c.Attention(n_heads=2), feedforward=c.Dense(d_ff=16),
        position=position, head=None, init_std=0.5, max_len=16,
    )  # fmt: skip
    return build(config, seed=seed, dtype=torch.float64)


@torch.no_grad()
def _encode(model: Model, tokens: Any) -> torch.Tensor:
    hidden: torch.Tensor = model.encode(torch.as_tensor(tokens))
    return hidden


def _follows(model: Model) -> torch.Tensor:
    """For all 120 orders of five tokens: how far the model's output is from following them."""
    tokens, orders = torch.tensor([3, 1, 4, 5, 9]), torch.tensor(ORDERS)
    straight = _encode(model, tokens[None])[0]
    return (_encode(model, tokens[orders]) - straight[orders]).abs().amax((1, 2))


def _engine_stack(lab: Lab) -> Finding:
    model = _stack(c.NoPosition(), c.DecoderConfig if lab.broken else c.EncoderConfig, lab.seed)
    return lab.numerical("engine, whole encoder", float(_follows(model).max()), 1e-11, orders=len(ORDERS))


def _controls(lab: Lab, x: Matrix, heads: Any) -> Iterator[Finding]:
    """A causal mask, or position vectors, leave the identity alone among 120 orders."""
    positions = _position_vectors(TOKENS, 4)[:, :3]
    counts = {
        "causal mask, exact": _followers(x, heads, causal(TOKENS)),
        "positions, exact": _followers(x, heads, positions=positions),
        "causal mask, engine": int((_follows(_stack(c.NoPosition(), c.DecoderConfig, lab.seed)) < 1e-9).sum()),
        "positions, engine": int((_follows(_stack(c.Sinusoidal(), seed=lab.seed)) < 1e-9).sum()),
    }
    for name, passing in counts.items():
        yield lab.exhaustive(name, abs(passing - 1), len(ORDERS), passing=passing)


def _position_vectors(n: int, width: int) -> Matrix:
    """The engine's sinusoids, rounded to thousandths so that they are short rationals."""
    waves = sinusoids(torch.arange(n), width, c.Sinusoidal())
    return rational((1000 * waves).round().numpy(), 1000)


@figure("permutation-equivariance", "Permute then attend, or attend then permute", height=2.9)
def draw_equivariance(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_map

    generator = lab.torch_rng()
    attention, x = random_layer(generator, 8, 2, 4, 4), 1.5 * normal(generator, 6, 8)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    axes = fig.canvas.subplots(1, 3, width_ratios=[1.15, 1, 1])
    _square(axes[0])
    gaps = []
    for masked in (False, True):
        straight, moved = (run(attention, rows, causal=masked)["out"] for rows in (x, x[order]))
        gaps.append((moved - straight[order]).abs())
    limit = float(gaps[1].max())
    for ax, gap, title in zip(axes[1:], gaps, ("no mask", "causal mask"), strict=True):
        shown = draw_map(ax, gap, high=limit)
        ax.set(title=f"{title}: at most {float(gap.max()):.1g}", xlabel="component", ylabel="token")
    fig.canvas.colorbar(shown, ax=axes[1:], location="bottom", shrink=0.6, label="|f(PX) - P f(X)|")


def _square(ax: Any) -> None:
    arrow = {"arrowstyle": "->", "lw": 1.2, "shrinkA": 16, "shrinkB": 20}
    for (x, y), text in {(0, 1): "$X$", (1, 1): "$f(X)$", (0, 0): "$PX$", (1, 0): "$f(PX)$"}.items():
        ax.text(x, y, text, ha="center", va="center", fontsize=11)
    for start, end, text, at in (
        ((0, 1), (1, 1), "$f$", (0.5, 1.09)),
        ((0, 0), (1, 0), "$f$", (0.5, 0.09)),
        ((0, 1), (0, 0), "$P$", (-0.12, 0.5)),
        ((1, 1), (1, 0), "$P$", (1.12, 0.5)),
    ):
        ax.annotate("", end, start, arrowprops=arrow)
        ax.text(*at, text, ha="center", va="center")
    ax.text(0.5, 0.5, "both ways\nagree", ha="center", va="center", fontsize=8, color="#666666")
    ax.set(xlim=(-0.35, 1.4), ylim=(-0.3, 1.3), aspect="equal")
    ax.axis("off")


@claim("order-needs-position")
def order_needs_position(lab: Lab) -> Iterator[Finding]:
    rng = lab.rng()
    words, heads = random_matrix(rng, 3, 4), random_heads(rng, 2, 4, 2)
    one, other = (words[ids] for ids in SENTENCES.values())
    positions = _position_vectors(3, 4)

    def pooled(x: Matrix, positioned: bool, allowed: Any = None) -> Matrix:
        total: Matrix = multihead(x + positions if positioned else x, heads, allowed)[1].sum(axis=0)
        return total

    same = (pooled(one, lab.broken) == pooled(other, lab.broken)).all()
    yield lab.exact("without positions", bool(same))
    apart = (pooled(one, positioned=True) != pooled(other, positioned=True)).any()
    yield lab.exact("with positions", bool(apart))
    masked = (pooled(one, False, causal(3)) != pooled(other, False, causal(3))).any()
    yield lab.exact("with a causal mask", bool(masked))
    five = random_matrix(rng, 5, 4)
    flat = [multihead(x + _position_vectors(5, 4) if lab.broken else x, heads)[1] for x in (five, five[::-1])]
    yield lab.exact("reversal", bool((flat[0] == flat[1][::-1]).all()))
    yield from _positions_from_the_mask(lab)
    yield from _sentences_in_the_engine(lab)


def _positions_from_the_mask(lab: Lab) -> Iterator[Finding]:
    """Uniform causal attention: the weight on the first token says how many tokens there are."""
    t, raised = sympy.symbols("t raised", positive=True)
    symbolic = sympy.simplify(raised / ((t + 1) * raised) - 1 / (t + 1)) == 0
    flat = weights(rational(np.zeros((10, 1))), rational(np.zeros((10, 1))), causal(10))[:, 0]
    exact = [Fraction(1, t + 1) for t in range(10)]
    holds = list(flat) == exact and len(set(exact)) == 10 and symbolic
    yield lab.exact("weight on the first token", holds, weights=[str(w) for w in flat])
    attention = random_layer(lab.torch_rng(), 4, 1, 4, 4)
    torch.nn.init.zeros_(attention.q.weight)
    seen = run(attention, normal(lab.torch_rng(1), 10, 4), causal=True)["pattern"][0, :, 0]
    gap = max(abs(float(w) - 1 / (t + 1)) for t, w in enumerate(seen))
    yield lab.numerical("weight on the first token, engine", gap, UNIT, tokens=10)


def _sentences_in_the_engine(lab: Lab) -> Iterator[Finding]:
    def apart(model: Model) -> float:
        one, other = (_encode(model, [ids])[0].sum(0) for ids in SENTENCES.values())
        return max_difference(one, other)

    position = c.Sinusoidal() if lab.broken else c.NoPosition()
    yield lab.numerical("encoder without positions", apart(_stack(position, seed=lab.seed)), 1e-11)
    yield lab.numerical("encoder with positions", apart(_stack(c.Sinusoidal(), seed=lab.seed)), None, low=1e-6)
    causal_model = _stack(c.NoPosition(), c.DecoderConfig, lab.seed)
    yield lab.numerical("decoder without positions", apart(causal_model), None, low=1e-6)


@figure("order-needs-position", "What an encoder makes of two sentences", height=3.2)
def draw_sentences(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_map

    models: dict[str, Model] = {
        "no positions": _stack(c.NoPosition(), seed=lab.seed),
        "sinusoidal positions": _stack(c.Sinusoidal(), seed=lab.seed),
    }
    axes = fig.canvas.subplots(2, 2)
    for row, (title, model) in zip(axes, models.items(), strict=True):
        assert isinstance(model, EncoderLM)
        for ax, (sentence, ids) in zip(row, SENTENCES.items(), strict=True):
            words = sentence.split()
            # rows sorted by word, not by position, so that equal vectors are adjacent
            shown = np.argsort(ids).tolist()
            picture = draw_map(ax, _encode(model, [ids])[0][shown], -2.5, 2.5, aspect="auto")
            ax.set_yticks(range(3), [words[i] for i in shown])
            ax.set(title=f"“{sentence}”, {title}", xlabel="" if title == "no positions" else "component")
    fig.canvas.colorbar(picture, ax=axes, label="value")
