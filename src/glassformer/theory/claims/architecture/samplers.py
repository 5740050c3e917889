"""Four ways to choose the next token: what each keeps, the effect of temperature, and the distribution of the draws."""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
import numpy as np
import sympy
import torch
from torch import Tensor

from glassformer.finding import Finding
from glassformer.generation import Sampling, distribution
from glassformer.generation.sampling import choose, keep_top_k, keep_top_p
from glassformer.lens.figure import COLOURS, GREY, Figure
from glassformer.reference import distribution as exact_distribution
from glassformer.theory.claims.claim import Lab, claim, figure
from glassformer.theory.claims.small_models import decoder
from glassformer.theory.claims.weights.samples import DELTA

DRAWS = 20_000
DECODERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 4": {"top_k": 4},
    "nucleus 0.8": {"top_p": 0.8},
}
SHARES = (Fraction(1, 10), Fraction(1, 2), Fraction(7, 10), Fraction(9, 10), Fraction(99, 100))


@claim("decoding-samplers")
def decoding_samplers(lab: Lab) -> Iterator[Finding]:
    yield from _temperature(lab)
    yield from _rational(lab)
    yield _nine_tenths(lab)
    yield from _drawn(lab)


def _temperature(lab: Lab) -> Iterator[Finding]:
    """dH/dtau = Var_p(z) / tau^3: for any log-partition function, and its curvature is a variance."""
    tau, beta = sympy.symbols("tau beta", positive=True)
    log_z = sympy.Function("F")
    # H = ln Z - beta <z> with beta = 1/tau and <z> = F'(beta)
    entropy = log_z(beta) - beta * log_z(beta).diff(beta)
    by_tau = (entropy.diff(beta) * sympy.diff(1 / tau, tau)).subs(beta, 1 / tau).doit()
    power = 2 if lab.broken else 3
    curvature = log_z(beta).diff(beta, 2).subs(beta, 1 / tau).doit()
    holds = sympy.simplify(by_tau - curvature / tau**power) == 0
    yield lab.exact("dH/dtau = F''(1/tau) / tau^3", holds)
    for n in (2, 3, 4):
        z = sympy.symbols(f"z0:{n}", real=True)
        total = sum(sympy.exp(beta * x) for x in z)
        p = [sympy.exp(beta * x) / total for x in z]
        mean = sum(q * x for q, x in zip(p, z, strict=True))
        variance = sum(q * x**2 for q, x in zip(p, z, strict=True)) - mean**2
        same = sympy.simplify(sympy.log(total).diff(beta, 2) - variance) == 0
        yield lab.exact(f"F'' = Var(z), {n} tokens", same)
    flat = torch.zeros(1, 8, dtype=torch.float64)
    same = all(
        torch.equal(distribution(flat, Sampling(t)), distribution(flat, Sampling(1.0))) for t in (0.1, 0.5, 2.0, 9.0)
    )
    yield lab.exact("equal logits stay equal", same)
    logits = _logits(lab.seed)[None]
    hot, warm, cold = (_entropy(distribution(logits, Sampling(t))[0]) for t in (2.0, 1.0, 0.5))
    yield lab.numerical("above 1 flattens, below 1 sharpens", min(hot - warm, warm - cold), None, low=0.05)
    near = distribution(logits, Sampling(1e-3))[0]
    yield lab.numerical("towards 0: greedy", float(1 - near[logits.argmax()]), 1e-12)


def _entropy(p: Tensor) -> float:
    return float(-(p[p > 0] * p[p > 0].log()).sum())


def random_shares(rng: np.random.Generator, size: int) -> list[Fraction]:
    """A distribution in rationals with no two equal probabilities."""
    weights = rng.permutation(np.arange(1, 40))[:size]
    return [Fraction(int(w), int(weights.sum())) for w in weights]


def smallest_set(p: list[Fraction], share: Fraction) -> set[int]:
    """Return by enumeration the smallest subset whose total reaches the share; of several, the most likely one."""
    found = [
        (len(chosen), -sum((p[i] for i in chosen), Fraction(0)), chosen)
        for size in range(1, len(p) + 1)
        for chosen in itertools.combinations(range(len(p)), size)
        if sum(p[i] for i in chosen) >= share
    ]
    return set(min(found)[2])


def _rational(lab: Lab) -> Iterator[Finding]:
    """The engine's filters on the logarithms of rational distributions against enumeration in exact arithmetic."""
    rng = lab.rng()
    wrong_k = wrong_p = below = cases_k = cases_p = 0
    for size in range(2, 9):
        for _ in range(6):
            p = random_shares(rng, size)
            logits = torch.tensor([[math.log(x) for x in p]], dtype=torch.float64)
            for k in range(1, size + 1):
                kept = set(np.flatnonzero(keep_top_k(logits, k)[0].isfinite()).tolist())
                most = max(itertools.combinations(range(size), k), key=lambda chosen: sum(p[i] for i in chosen))
                wrong_k, cases_k = wrong_k + (kept != set(most)), cases_k + 1
            totals = set(itertools.accumulate(sorted(p, reverse=True)))
            for share in set(SHARES) - totals:  # where a total equals p, float rounding decides: see below
                kept = set(np.flatnonzero(keep_top_p(logits, float(share))[0].isfinite()).tolist())
                if lab.broken:  # stops before p is reached
                    kept -= {min(kept, key=lambda i: p[i])}
                wrong_p, cases_p = wrong_p + (kept != smallest_set(p, share)), cases_p + 1
                below += sum((p[i] for i in kept), Fraction(0)) < share
    yield lab.exhaustive("top-k", wrong_k, cases_k)
    yield lab.exhaustive("nucleus", wrong_p, cases_p)
    yield lab.exhaustive("nucleus reaches p", below, cases_p)


def _nine_tenths(lab: Lab) -> Finding:
    """Nine times 0.1: the sum in exact arithmetic and in float64."""
    running = 0.0
    for _ in range(9):
        running += 0.1
    kept = int(keep_top_p(torch.zeros(1, 10, dtype=torch.float64), 0.9)[0].isfinite().sum())
    exact = smallest_set([Fraction(1, 10)] * 10, Fraction(9, 10))
    holds = running == 0.8999999999999999 and running < 0.9 and len(exact) == 9 and kept in (9, 10)
    return lab.exact("the float trap", holds, running=running, exact=len(exact), engine=kept)


@lru_cache(maxsize=8)
@torch.no_grad()
def _logits(seed: int) -> Tensor:
    """Of an untrained model after three tokens, scaled to standard deviation 1."""
    logits = decoder(seed=seed, vocab_size=12)(torch.tensor([[3, 1, 4]]))[0, -1]
    scaled: Tensor = (logits - logits.mean()) / logits.std(correction=0)
    return scaled


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi^2 >= statistic), the regularised incomplete gamma function Q(freedom / 2, statistic / 2)."""
    return float(mpmath.gammainc(freedom / 2, statistic / 2, mpmath.inf, regularized=True))


def sample(seed: int, options: dict[str, Any], stream: int) -> np.ndarray:
    """Return how often each token occurs in 20,000 draws of the package's sampler."""
    uniform = torch.rand(DRAWS, generator=torch.Generator().manual_seed(1000 * seed + stream), dtype=torch.float64)
    drawn = choose(_logits(seed).expand(DRAWS, -1), Sampling(**options), uniform)
    return np.bincount(drawn.numpy(), minlength=12)


def _drawn(lab: Lab) -> Iterator[Finding]:
    logits = _logits(lab.seed).numpy()
    every = {name: exact_distribution(logits, **options) for name, options in DECODERS.items()}
    wrong = 0
    for stream, (name, options) in enumerate(DECODERS.items()):
        counts = sample(lab.seed, options, stream)
        p = exact_distribution(logits) if lab.broken else every[name]
        wrong += bool(((counts > 0) & (p == 0)).any() or ((counts == 0) & (p * DRAWS > 20)).any())
        if name == "greedy" and not lab.broken:
            continue
        support = p > 0
        expected = p[support] * DRAWS
        statistic = float(((counts[support] - expected) ** 2 / expected).sum())
        tail = chi_square_tail(statistic, len(expected) - 1)
        seen = {
            "draws": DRAWS,
            "chi_square": statistic,
            "expected_least": float(expected.min()),
            "tokens": len(expected),
        }
        yield lab.statistical(f"{name}: draws", tail, 1.0, DELTA, low=DELTA, **seen)
    yield lab.exhaustive("supports", wrong, len(DECODERS), sizes={n: int((p > 0).sum()) for n, p in every.items()})
    greedy = sample(lab.seed, DECODERS["greedy"], 0)
    yield lab.exact("greedy is one token", int(greedy.max()) == DRAWS)
    apart = {
        f"{a} / {b}": 0.5 * float(np.abs(every[a] - every[b]).sum()) for a, b in itertools.combinations(DECODERS, 2)
    }
    yield lab.numerical("decoders differ", min(apart.values()), None, low=0.05, pairs=apart)


@figure("decoding-samplers", "The next token of an untrained model, tokens by probability", height=4.0)
def draw_decoders(lab: Lab, fig: Figure) -> None:
    logits = _logits(lab.seed).numpy()
    order = np.argsort(-logits)
    plain = exact_distribution(logits)[order]
    axes = fig.canvas.subplots(2, 2, sharex=True, sharey=True)
    for stream, (ax, (name, options)) in enumerate(zip(axes.flat, DECODERS.items(), strict=True)):
        ax.bar(range(12), exact_distribution(logits, **options)[order], color=COLOURS[0], label="exact")
        ax.plot(
            range(12),
            sample(lab.seed, options, stream)[order] / DRAWS,
            "o",
            color=COLOURS[1],
            markersize=3,
            label="drawn",
        )
        ax.step(
            np.arange(13) - 0.5,
            [*plain, plain[-1]],
            where="post",
            color=GREY,
            linewidth=0.8,
            label="the model's own",
        )
        ax.set(title=name, ylim=(0, 1.05))
    for ax in axes[1]:
        ax.set(xlabel="token, most likely first", xticks=range(12))
    for ax in axes[:, 0]:
        ax.set_ylabel("probability")
    axes[0, 1].legend()
