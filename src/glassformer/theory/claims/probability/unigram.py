"""The best unigram model of a text is its table of frequencies."""

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import sympy as sp
import torch
import torch.nn.functional as F

from glassformer import config as c
from glassformer.finding import Finding
from glassformer.lens.figure import AMOUNT, COLOURS, Figure
from glassformer.model import DecoderLM, build
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.rounding import max_difference
from glassformer.theory.claims.small_models import one_layer

Counts = tuple[int, int, int]


def triples(total: int) -> list[Counts]:
    """All (a, b, c) of whole numbers from 0 with this sum."""
    return [(a, b, total - a - b) for a in range(total + 1) for b in range(total + 1 - a)]


def points(largest: int) -> list[tuple[Counts, int]]:
    """All (a, b, c)/d on the simplex with d <= largest; the same point comes with each of its denominators."""
    return [(t, d) for d in range(1, largest + 1) for t in triples(d)]


def likelihood(counts: Counts, theta: Counts) -> int:
    """prod theta_k^N_k of whole numbers, with 0^0 = 1: the likelihood times d^N."""
    return math.prod(t**n for t, n in zip(theta, counts, strict=True))


@claim("unigram-mle")
def unigram_mle(lab: Lab) -> Iterator[Finding]:
    """Under `broken` the estimate is smoothed: (N_k + 1) / (N + 3)."""
    yield _enumerated(lab)
    yield _kkt(lab)
    yield _gibbs(lab)
    yield _trained(lab)


def estimate(counts: Counts, smoothed: bool) -> tuple[Counts, int]:
    """The claimed optimum as numerators over a denominator."""
    if smoothed:
        return (counts[0] + 1, counts[1] + 1, counts[2] + 1), sum(counts) + 3
    return counts, sum(counts)


def _enumerated(lab: Lab) -> Finding:
    """Likelihoods compared as whole numbers: L(theta) <= L(best) with equality only at the best."""
    wrong = cases = 0
    candidates = points(12)
    for counts in (t for N in range(1, 7) for t in triples(N)):
        best, N = estimate(counts, lab.broken)
        peak, n = likelihood(counts, best), sum(counts)
        for theta, d in candidates:
            here, there = likelihood(counts, theta) * N**n, peak * d**n
            same = all(t * N == b * d for t, b in zip(theta, best, strict=True))
            wrong += not (here < there or (same and here == there))
            cases += 1
    different = sum(math.gcd(*theta) == 1 for theta, _ in candidates)
    return lab.exhaustive("every theta on the grid", wrong, cases, thetas=len(candidates), different_thetas=different)


def _kkt(lab: Lab) -> Finding:
    """N_k/theta_k = lambda where theta_k > 0, 0 <= lambda where theta_k = 0, with lambda = N; zero counts included."""
    wrong = cases = zeros = 0
    for counts in (t for N in range(1, 7) for t in triples(N)):
        best, N = estimate(counts, lab.broken)
        multiplier = sum(counts)
        for n, numerator in zip(counts, best, strict=True):
            theta = Fraction(numerator, N)
            slope = Fraction(n) / theta if theta else Fraction(0)
            slack = multiplier - slope
            wrong += slack < 0 or slack * theta != 0
            zeros += n == 0
            cases += 1
    return lab.exhaustive("KKT multipliers", wrong, cases, multiplier="lambda = N", zero_counts=zeros)


def _gibbs(lab: Lab) -> Finding:
    """ln x <= x - 1, the inequality that makes the critical point the maximum."""
    x = sp.Symbol("x", positive=True)
    gap = x - 1 - sp.log(x)
    lowest = sp.solve(sp.diff(gap, x), x) == [1] and gap.subs(x, 1) == 0
    convex = sp.diff(gap, x, 2).is_positive
    return lab.exact("Gibbs' inequality", bool(lowest and convex))


def bag_of_words(vocabulary: int) -> DecoderLM:
    """A model whose logits are its head's bias alone: it knows no context."""
    cfg = one_layer(
        c.DecoderConfig, vocab_size=vocabulary, d_model=4, attention=c.Attention(1), head=c.Head(tied=False, bias=True)
    )
    model = build(cfg, dtype=torch.float64)
    assert isinstance(model, DecoderLM)
    assert model.head is not None
    assert model.head.weight is not None
    model.requires_grad_(False)
    model.head.weight.zero_()
    assert model.head.bias is not None
    model.head.bias.requires_grad_(True)
    return model


def _trained(lab: Lab) -> Finding:
    """Gradient descent from equal probabilities, on the engine, to the entropy of the text."""
    text = "a rose is a rose is a rose"
    letters = sorted(set(text))
    tokens = torch.tensor([[letters.index(letter) for letter in text]])
    shares = np.bincount(tokens[0].numpy()) / len(text)
    if lab.broken:
        shares = (shares * len(text) + 1) / (len(text) + len(letters))
    entropy = float(-(shares * np.log(shares)).sum())
    model = bag_of_words(len(letters))
    assert model.head is not None
    bias = model.head.bias
    assert bias is not None
    steps = 150
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        (slope,) = torch.autograd.grad(loss, bias)
        with torch.no_grad():
            bias.sub_(4.0 * slope)
    nll = float(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).detach())
    off = max_difference(bias.detach().softmax(-1).numpy(), shares)
    return lab.empirical(
        "trained on the engine",
        nll - entropy,
        -1e-12,
        1e-6,
        nll=nll,
        entropy=entropy,
        largest_probability_error=off,
        steps=steps,
    )


@figure("unigram-mle", "Likelihood of counts (3, 2, 1) over all unigram models", width=4.6, height=3.6)
def draw(lab: Lab, fig: Figure) -> None:
    """The simplex as a triangle, theta_1 left, theta_2 right, theta_3 on top."""
    counts = (3, 2, 1)
    steps = 90
    grid = np.array(triples(steps)) / steps
    height = np.prod(grid ** np.array(counts), axis=1)
    x, y = grid[:, 1] + grid[:, 2] / 2, grid[:, 2] * math.sqrt(3) / 2
    best = np.array(counts) / sum(counts)
    ax = fig.canvas.subplots()
    image = ax.tricontourf(x, y, height / height.max(), levels=np.linspace(0, 1, 11), cmap=AMOUNT)
    ax.plot(best[1] + best[2] / 2, best[2] * math.sqrt(3) / 2, "o", color=COLOURS[1], markersize=5)
    ax.annotate(
        "(3/6, 2/6, 1/6)",
        (best[1] + best[2] / 2, best[2] * math.sqrt(3) / 2),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        fontsize=8,
    )
    for at, name, side in (((0, -0.03), "θ₁ = 1", "top"), ((1, -0.03), "θ₂ = 1", "top")):
        ax.text(*at, name, ha="center", va=side)
    ax.text(0.5, math.sqrt(3) / 2 + 0.02, "θ₃ = 1", ha="center", va="bottom")
    ax.set(aspect="equal", xlim=(-0.1, 1.1), ylim=(-0.12, 0.98))
    ax.axis("off")
    fig.canvas.colorbar(image, ax=ax, label="likelihood / largest", shrink=0.8)
