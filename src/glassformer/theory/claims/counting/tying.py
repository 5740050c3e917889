"""One table for input and output: what sharing it saves, and what it costs."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, get_args

import sympy as sp
import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import Figure
from glassformer.model import NO_TAP, DecoderLM, build, n_parameters
from glassformer.sizing import count
from glassformer.theory.claims.claim import Kind, Lab, claim, figure, impossible, possible, solve
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import one_layer

Between = Literal["tied", "untied", "tied with an MLP"]
CYCLE = ((0, 1), (1, 2), (2, 0))
"""A is followed by B, B by C, C by A."""
STEPS = 3000


def decoder(vocab: int, d: int, tied: bool, bias: bool = False) -> c.DecoderConfig:
    return one_layer(
        c.DecoderConfig,
        vocab_size=vocab,
        d_model=d,
        attention=c.Attention(1),
        feedforward=c.Dense(4 * d),
        head=c.Head(tied=tied, bias=bias),
    )


@claim("weight-tying-saving")
def weight_tying_saving(lab: Lab) -> Iterator[Finding]:
    for vocab, d in ((50257, 768), (32128, 512), (65, 24)):
        tied = decoder(vocab, d, tied=True, bias=lab.broken)
        untied = decoder(vocab, d, tied=False)
        saved = n_parameters(build(untied, device="meta")) - n_parameters(build(tied, device="meta"))
        yield lab.exact(f"V = {vocab}, d = {d}", saved == vocab * d == count(untied) - count(tied), saved=saved)
    tied_model, untied_model, tokens = _pair(lab)
    logits = tied_model(tokens), untied_model(tokens)
    differing = int((logits[0] != logits[1]).sum())
    yield lab.exact("the same logits, bit for bit", differing == 0, entries=logits[0].numel(), differing=differing)
    for out in logits:
        F.cross_entropy(out.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    assert untied_model.head is not None
    head = untied_model.head.weight
    assert head is not None
    table, other = tied_model.embed.tokens.weight.grad, untied_model.embed.tokens.weight.grad
    assert table is not None
    assert other is not None
    assert head.grad is not None
    yield lab.numerical(
        "tied gradient = sum of the two",
        max_difference(table, (other + head.grad)),
        1e-10,
        size=float(table.abs().max()),
    )


def _pair(lab: Lab) -> tuple[DecoderLM, DecoderLM, Tensor]:
    """A tied model, an untied one with the same weights (broken: with a head of its own), and tokens."""
    vocab, d = 23, 12
    tied, untied = (build(decoder(vocab, d, tied), seed=lab.seed, dtype=torch.float64) for tied in (True, False))
    assert isinstance(tied, DecoderLM)
    assert isinstance(untied, DecoderLM)
    state = {name: 20 * value if value.dim() > 1 else value for name, value in tied.state_dict().items()}
    tied.load_state_dict(state)
    own = untied.state_dict()["head.weight"]
    untied.load_state_dict({**state, "head.weight": 20 * own if lab.broken else state["embed.tokens.weight"]})
    return tied, untied, torch.randint(vocab, (3, 11), generator=lab.torch_rng())


@claim("weight-tying-expressivity")
def weight_tying_expressivity(lab: Lab) -> Iterator[Finding]:
    symmetric = not lab.broken
    yield lab.exact("a sum of three gaps is zero", _gaps_cancel(symmetric))
    yield solve(lab, "z3: no symmetric scores follow the cycle", lambda z3: impossible(z3, *_cycle(z3, symmetric)))
    yield solve(lab, "z3: free scores do", lambda z3: possible(z3, *_cycle(z3, False)))
    yield lab.exact("ln 3 bounds the tied loss", _loss_bound())
    symmetry = _engine_asymmetry(lab)
    yield lab.numerical("the engine's zero-layer logits are symmetric", symmetry, 1e-14)
    yield lab.numerical("an untied model written down", _written_down(), 1e-8)
    if lab.slow:
        yield from _trained_parts(lab)
    else:
        yield lab.skipped("trained on the cycle", Kind.EMPIRICAL, "three short trainings: run with --slow")


def _trained_parts(lab: Lab) -> Iterator[Finding]:
    losses = {kind: trained(kind, lab.seed)[0] for kind in get_args(Between)}
    yield lab.empirical(
        "tied, trained on the cycle", losses["untied" if lab.broken else "tied"], math.log(3) - 1e-6, None, **losses
    )
    yield lab.empirical("untied, trained on the cycle", losses["untied"], None, 0.01)
    yield lab.empirical("tied with an MLP between, trained on the cycle", losses["tied with an MLP"], None, 0.01)


def _written_down() -> float:
    """Loss of the engine's untied zero-layer model with a head that holds the cycle."""
    model, logits = zero_layer("untied")
    assert model.head is not None
    assert model.head.weight is not None
    with torch.no_grad():
        model.embed.tokens.weight.copy_(torch.eye(3, 8))
        model.head.weight.copy_(20 * torch.eye(3, 8).roll(1, 0))  # row j: the token before j
        return float(F.cross_entropy(logits(), torch.tensor([after for _, after in CYCLE])))


def _gaps_cancel(symmetric: bool) -> bool:
    """The three gaps that the cycle needs positive add up to zero when scores are symmetric."""
    s = sp.Matrix(3, 3, lambda i, j: sp.Symbol(f"s{min(i, j)}{max(i, j)}" if symmetric else f"s{i}{j}"))
    gaps = sum(s[i, j] - s[i, 3 - i - j] for i, j in CYCLE)
    return sp.expand(gaps) == 0


def _cycle(z3: Any, symmetric: bool) -> list[Any]:
    """The cycle as argmax of each row of the scores."""
    s = [[z3.Real(f"s{i}{j}") for j in range(3)] for i in range(3)]
    equal = [s[i][j] == s[j][i] for i in range(3) for j in range(i)] if symmetric else []
    return [*equal, *(s[i][j] > s[i][k] for i, j in CYCLE for k in range(3) if k != j)]


def _loss_bound() -> bool:
    """The averaging argument, step by step: equal off-diagonals, eigenvalue a - b, a loss that rises from ln 3."""
    s = sp.Matrix(3, 3, lambda i, j: sp.Symbol(f"s{min(i, j)}{max(i, j)}"))
    shift = sp.Matrix(3, 3, lambda i, j: 1 if j == (i + 1) % 3 else 0)
    mean = sum((shift**k * s * (shift**k).T for k in range(3)), sp.zeros(3)) / 3
    a, b = mean[0, 0], mean[0, 1]
    circulant = sp.simplify(mean - (b * sp.ones(3) + (a - b) * sp.eye(3))) == sp.zeros(3)
    vector = sp.Matrix([1, -1, 0])
    eigenvalue = sp.simplify(mean * vector - (a - b) * vector) == sp.zeros(3, 1)
    gap = sp.Symbol("t", nonnegative=True)
    loss = sp.log(sp.exp(gap) + 2)  # cross-entropy of one row: diagonal gap above two equal entries
    rises = sp.diff(loss, gap).is_positive and loss.subs(gap, 0) == sp.log(3)
    return bool(circulant and eigenvalue and rises)


def zero_layer(kind: Between, seed: int = 0) -> tuple[DecoderLM, Any]:
    """A model of width 8 on three tokens, and its logits (3,3) as a function: embedding straight into the head.

    The engine has no model without blocks, so its own embedding and head are called one after the other, with the
    block's own feed-forward between where there is one.
    """
    config = decoder(3, 8, tied=kind != "untied")
    model = build(config, seed=seed, dtype=torch.float64)
    assert isinstance(model, DecoderLM)
    tokens = torch.arange(3)[None]
    feed = model.blocks[0].get_submodule("feedforward")

    def logits() -> Tensor:
        x = model.embed(tokens)
        if kind == "tied with an MLP":
            x = x + feed(x, NO_TAP)
        return model.logits(x)[0]

    return model, logits


def _engine_asymmetry(lab: Lab) -> float:
    model, logits = zero_layer("untied" if lab.broken else "tied", lab.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(30)  # from the initial 0.02 to size one
        scores = logits()
    return max_difference(scores, scores.T)


@cache
def trained(kind: Between, seed: int = 0, steps: int = STEPS) -> tuple[float, Tensor]:
    """Loss and logits (3,3) after `steps` of Adam on the cycle, one batch of all three transitions."""
    model, logits = zero_layer(kind, seed)
    targets = torch.tensor([after for _, after in CYCLE])
    loss = F.cross_entropy(logits(), targets)
    loss.backward()
    used = [parameter for parameter in model.parameters() if parameter.grad is not None]
    optimizer = torch.optim.Adam(used, lr=1e-2, fused=True)
    loss = F.cross_entropy(logits(), targets)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss = F.cross_entropy(logits(), targets)
    return float(loss.detach()), logits().detach()


@figure("weight-tying-expressivity", "Zero-layer logits trained on A → B → C → A", height=3.1)
def draw_tying(lab: Lab, fig: Figure) -> None:
    from glassformer.lens.figures.attention import draw_map

    kinds: tuple[Between, ...] = ("tied", "untied")
    axes = fig.canvas.subplots(1, 2)
    for ax, kind in zip(axes, kinds, strict=True):
        loss, scores = trained(kind, lab.seed)
        shown = scores - scores.mean(1, keepdim=True)  # softmax does not see a row's mean
        reach = max(float(shown.abs().max()), 1.0)
        image = draw_map(ax, shown, -reach, reach)
        for i in range(3):
            for j in range(3):
                value = float(shown[i, j])
                ax.text(
                    j,
                    i,
                    f"{value + 0:.2f}".replace("-0.00", "0.00"),
                    ha="center",
                    va="center",
                    color="white" if abs(value) > 0.6 * reach else "black",
                )
        ax.set_xticks(range(3), "ABC")
        ax.set_yticks(range(3), "ABC")
        ax.set_xlabel("next token")
        ax.set_title(f"{kind}: loss {loss:.7f}" if kind == "tied" else f"{kind}: loss {loss:.0e}")
        fig.canvas.colorbar(image, ax=ax, shrink=0.8, label="logit, row mean removed")
    axes[0].set_ylabel("token")
