"""Grokking: the compact circuit for modular addition, what a norm can and cannot say, and the run that shows it."""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import numpy as np
import torch

from glassformer.finding import Finding
from glassformer.lens.figure import COLOURS, Figure
from glassformer.lens.grokking import check_circuit, compact_circuit, grok, quadratic
from glassformer.theory.claims.claim import Kind, Lab, claim, figure
from glassformer.theory.claims.weights.rational import rational

PRIMES = (5, 7, 31, 59, 113)
run_once = cache(grok)


@claim("grokking-weight-norm")
def grokking_weight_norm(lab: Lab) -> Iterator[Finding]:
    moduli = (9, 15, 25) if lab.broken else PRIMES
    wrong, cases = _residues_wrong(moduli)
    yield lab.exhaustive("any frequency singles out a + b", wrong, cases, moduli=list(moduli))
    checks = [check_circuit(p) for p in PRIMES]
    yield lab.exhaustive(
        "all inputs, all frequencies",
        sum(c.p**2 - c.right for c in checks),
        sum(c.p**2 for c in checks),
        margins={str(c.p): c.smallest_margin for c in checks},
    )
    yield lab.numerical(
        "margin p/2",
        max(max(abs(c.smallest_margin - c.p / 2), abs(c.largest_margin - c.p / 2)) / c.p for c in checks),
        1e-14,
    )
    yield lab.exact("wrong answers get -1/2", _half_sums(moduli))
    subsets, failed = _subsets_wrong(9 if lab.broken else 7)
    yield lab.exhaustive("every non-empty set of frequencies", failed, subsets)
    same, norms = _rescaled(lab)
    yield lab.exact("a norm does not fix a function", same, squared_norms=[float(n) for n in norms])
    yield lab.exact("equal margin, smaller norm: larger normalised margin", _homogeneous(lab))
    if lab.slow:
        yield from _training_parts(lab)
    else:
        yield lab.skipped("the run itself", Kind.EMPIRICAL, "trains three small networks: run with --slow")


def _residues_wrong(moduli: tuple[int, ...]) -> tuple[int, int]:
    """Pairs (k, r), neither 0, with k r = 0 mod p: none for a prime. Whole numbers only."""
    pairs = [(p, k, r) for p in moduli for k, r in itertools.product(range(1, p), repeat=2)]
    return sum(k * r % p == 0 for p, k, r in pairs), len(pairs)


def _half_sums(moduli: tuple[int, ...]) -> bool:
    """For r not 0, k r runs over all residues but 0: cosines over k = 1 .. p-1 add up to -1, half of them to -1/2."""
    permuted = all(sorted(k * r % p for k in range(1, p)) == list(range(1, p)) for p in moduli for r in range(1, p))
    return permuted


def _subsets_wrong(p: int) -> tuple[int, int]:
    """Non-empty sets of frequencies 1 .. p-1, and how many of them miss a + b for some input."""
    sets = [list(s) for n in range(1, p) for s in itertools.combinations(range(1, p), n)]
    return len(sets), sum(check_circuit(p, chosen).right < p * p for chosen in sets)


def _rescaled(lab: Lab) -> tuple[bool, list[Fraction]]:
    """f(x) = relu(x W_1) W_2 with whole-number weights, before and after (c W_1, W_2/c)."""
    rng, c = lab.rng(), Fraction(7, 3)
    first, last = (rational(rng.integers(-4, 5, shape)) for shape in ((3, 5), (5, 2)))
    x = rational(list(itertools.product(range(-2, 3), repeat=3)))
    plain, scaled = (first, last), (c * first, last / c)
    outputs = [np.maximum(x @ w1, 0) @ w2 for w1, w2 in (plain, scaled)]
    norms = [(w1**2).sum() + (w2**2).sum() for w1, w2 in (plain, scaled)]
    return bool((outputs[0] == outputs[1]).all()) and norms[0] != norms[1], norms


def _homogeneous(lab: Lab) -> bool:
    """quadratic(x; c W) = c³ quadratic(x; W), in whole numbers that float64 holds exactly."""
    rng = lab.torch_rng()
    x, first, last = (torch.randint(-3, 4, s, generator=rng).double() for s in ((20, 6), (6, 8), (8, 5)))
    plain, doubled = quadratic(x, first, last), quadratic(x, 2 * first, 2 * last)
    return bool((doubled == 8 * plain).all())


def _training_parts(lab: Lab) -> Iterator[Finding]:
    decayed, free, strong = (run_once(31, wd, 3000, lab.seed) for wd in (0.5, 0.0, 2.0))
    run = free if lab.broken else decayed
    memorised = run.first("train_accuracy", 1.0)
    tests = dict(zip(run.steps, run.test_accuracy, strict=True))
    yield lab.empirical("memorised by step 500", float("nan") if memorised is None else memorised, None, 500)
    yield lab.empirical("not yet understood then", tests.get(memorised or 0, 1.0), None, 0.2)
    yield lab.empirical(
        "understood by step 3000", max(run.test_accuracy), 0.95, None, first_step=run.first("test_accuracy", 0.95)
    )
    yield lab.empirical(
        "the norm falls again", run.norm[-1] / run.peak_norm, None, 0.95, peak=run.peak_norm, final=run.norm[-1]
    )
    yield lab.empirical("no decay, no understanding", free.test_accuracy[-1], None, 0.3)
    yield lab.empirical("no decay, larger norm", free.norm[-1] / decayed.norm[-1], 1.3, None, norm=free.norm[-1])
    understood = strong.first("test_accuracy", 0.95)
    norms = dict(zip(strong.steps, strong.norm, strict=True))
    yield lab.empirical(
        "strong decay: understood while the norm rises",
        strong.norm[-1] / norms[understood] if understood is not None else float("nan"),
        1.05,
        None,
        first_step=understood,
    )


@figure("grokking-weight-norm", "Addition modulo 31, half of the pairs: with weight decay and without", height=4.6)
def draw_grokking(lab: Lab, fig: Figure) -> None:
    grid = fig.canvas.subplots(2, 2, sharex="col", width_ratios=(1.5, 1))
    for decay, style in ((0.5, "-"), (0.0, "--")):
        # half the units and two thirds of the steps of the check
        run, name = run_once(31, decay, 2000, lab.seed, width=64), f"decay {decay:g}"
        grid[0, 0].plot(run.steps, run.train_accuracy, style, color=COLOURS[0], label=f"training, {name}")
        grid[0, 0].plot(run.steps, run.test_accuracy, style, color=COLOURS[1], label=f"test, {name}")
        grid[1, 0].plot(run.steps, run.norm, style, color=COLOURS[2], label=name)
    grid[0, 0].set_ylabel("accuracy")
    grid[0, 0].set_ylim(-0.03, 1.03)
    grid[0, 0].legend(loc="center right")
    grid[1, 0].set_ylabel("norm of the weights")
    grid[1, 0].set_xlabel("step")
    grid[1, 0].legend(loc="upper left")
    for ax, chosen, title in zip(grid[:, 1], (None, [3]), ("circuit, all k", "circuit, k = 3 alone"), strict=True):
        ax.plot(range(-15, 16), compact_circuit(31, chosen)[15, 0], "o-", markersize=3, color=COLOURS[3])
        ax.set_title(title)
        ax.set_ylabel("logit")
    grid[1, 1].set_xlabel("c − (a + b) mod 31")
