"""Exercises about choosing the next token: temperature, top-k, top-p."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake, softmax


def _inspect_distribution(arguments: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    p = values[0]
    if not np.isfinite(p).all():
        return "your probabilities contain NaN or infinity because exp overflows: subtract the largest logit first"
    if (p < 0).any():
        return "some of your probabilities are negative"
    return f"your probabilities sum to {p.sum():.6g}, not to 1" if not np.isclose(p.sum(), 1) else ""


def _overflowing(rng: np.random.Generator, **more: Any) -> Case:
    hint = "exp overflows: subtract the largest logit first"
    return Case("logits around 2000", {"logits": 2000 + rng.normal(size=5), **more}, hint)


def temperature(logits: Array, tau: float) -> Array:
    """Return probabilities proportional to exp(logits / tau)."""
    scaled = logits / tau
    p = np.exp(scaled - scaled.max())
    return p / p.sum()


TEMPERATURE = Exercise(
    id="temperature",
    title="Sampling with a temperature",
    problem="""\
Return the probabilities (V) with which the next token is drawn at temperature tau > 0: p_i is proportional to
exp(logits_i / tau). A tau below 1 sharpens the distribution, a tau above 1 flattens it, and tau = 1 leaves it
unchanged. Logits may be large.""",
    solve=temperature,
    cases=lambda rng: [
        Case("tau 0.5", {"logits": rng.normal(size=6), "tau": 0.5}),
        Case("tau 2", {"logits": 3 * rng.normal(size=6), "tau": 2.0}),
        Case("tau 1", {"logits": rng.normal(size=4), "tau": 1.0}),
        _overflowing(rng, tau=0.7),
    ],
    returns=("probabilities",),
    mistakes=(
        Mistake(
            "you multiply the logits by tau: divide by it, so that a large tau flattens the distribution",
            {"logits / tau": "logits * tau"},
        ),
        Mistake(
            "you divide the probabilities by tau and normalise, which has no effect: divide the logits",
            {"scaled = logits / tau": "scaled = logits", "return p / p.sum()": "p = p / tau\n    return p / p.sum()"},
        ),
        Mistake("you divide by the square root of tau: divide by tau", {"logits / tau": "logits / np.sqrt(tau)"}),
        Mistake(
            "exp of a large logit overflows: subtract the largest logit before exp", {"scaled - scaled.max()": "scaled"}
        ),
        Mistake("you return exp of the scaled logits: divide by their sum", {"return p / p.sum()": "return p"}),
        Mistake(
            "you take the logarithm of the probabilities: return the probabilities themselves",
            {"return p / p.sum()": "return np.log(p / p.sum())"},
        ),
    ),
    inspect=_inspect_distribution,
    claims=("decoding-samplers",),
    sources=("Ch. 13 ex. 16",),
)


def top_k(logits: Array, k: int) -> Array:
    """Return softmax over the k largest logits, 0 for other tokens."""
    kept = np.argsort(-logits)[:k]
    p = np.zeros(len(logits))
    p[kept] = np.exp(logits[kept] - logits.max())
    return p / p.sum()


TOP_K = Exercise(
    id="top-k",
    title="Top-k sampling",
    problem="""\
Return the probabilities (V) of top-k sampling. Only the k tokens with the largest logits can be drawn; their
probabilities are the softmax over these k logits. Every other token has probability exactly 0. k is at least 1 and may
exceed the number of tokens. No two logits are equal.""",
    solve=top_k,
    cases=lambda rng: [
        Case("k 3 of 8", {"logits": rng.normal(size=8), "k": 3}),
        Case("k 1", {"logits": rng.normal(size=5), "k": 1}, "k = 1 is greedy decoding: one token has probability 1"),
        Case(
            "k 10 of 5", {"logits": rng.normal(size=5), "k": 10}, "if k exceeds the number of tokens, keep all of them"
        ),
        Case("k 5 of 5", {"logits": rng.normal(size=5), "k": 5}, "if k equals the number of tokens, keep all of them"),
        Case("negative logits", {"logits": -5 - np.abs(rng.normal(size=6)), "k": 2}),
        _overflowing(rng, k=2),
    ],
    returns=("probabilities",),
    mistakes=(
        Mistake("you keep the k smallest logits: keep the largest", {"argsort(-logits)": "argsort(logits)"}),
        Mistake(
            "you set the logits of removed tokens to 0, and exp(0) is 1: set them to -inf",
            {"np.zeros(len(logits))": "np.exp(np.zeros(len(logits)) - logits.max())"},
        ),
        Mistake(
            "you do not normalise the remaining probabilities: divide them by their sum",
            {"return p / p.sum()": "return p / np.exp(logits - logits.max()).sum()"},
        ),
        Mistake("you keep one token too many", {"[:k]": "[: k + 1]"}),
        Mistake("you keep one token too few", {"[:k]": "[: max(k - 1, 1)]"}),
    ),
    inspect=_inspect_distribution,
    claims=("decoding-samplers",),
    sources=("Ch. 13 ex. 16",),
)


def top_p(logits: Array, p: float) -> Array:
    """Return the probabilities of top-p sampling."""
    q = softmax(logits)
    order = np.argsort(-q)
    before = np.cumsum(q[order]) - q[order]
    kept = order[before < p]
    result = np.zeros(len(q))
    result[kept] = q[kept]
    return result / result.sum()


def _nucleus_cases(rng: np.random.Generator) -> list[Case]:
    halves = np.log([0.25, 0.5, 0.125, 0.125])
    return [
        Case("p 0.8", {"logits": 2 * rng.normal(size=8), "p": 0.8}),
        Case("p 0.5", {"logits": rng.normal(size=6), "p": 0.5}),
        Case("p 0.05", {"logits": rng.normal(size=5), "p": 0.05}, "the most likely token is always kept"),
        Case("p 1", {"logits": rng.normal(size=5), "p": 1.0}, "p = 1 keeps every token"),
        Case("probabilities 1/4, 1/2, 1/8, 1/8 and p 0.7", {"logits": halves, "p": 0.7}),
        Case("probabilities 0.2, 0.45, 0.25, 0.1 and p 0.8", {"logits": np.log([0.2, 0.45, 0.25, 0.1]), "p": 0.8}),
        Case("ten probabilities around 0.1", {"logits": 0.05 * rng.normal(size=10), "p": 0.55}),
        _overflowing(rng, p=0.6),
    ]


TOP_P = Exercise(
    id="top-p",
    title="Top-p (nucleus) sampling",
    problem="""\
Return the probabilities (V) of top-p (nucleus) sampling. Sort the tokens by decreasing probability and keep the
shortest prefix whose probabilities sum to at least p; the token that crosses p is kept. Divide the kept probabilities
by their sum. Every other token has probability exactly 0. Entry i of the result belongs to token i. 0 < p <= 1.""",
    solve=top_p,
    cases=_nucleus_cases,
    returns=("probabilities",),
    mistakes=(
        Mistake(
            "you drop the token that crosses p, so the kept tokens sum to less than p: keep it",
            {"order[before < p]": "order[: max(1, sum(np.cumsum(q[order]) <= p))]"},
        ),
        Mistake(
            "you keep one token too many: stop at the token that reaches p",
            {"order[before < p]": "order[: sum(before < p) + 1]"},
        ),
        Mistake(
            "you keep every token whose own probability is at least p: the sum of the kept tokens must reach p",
            {"order[before < p]": "order[: max(1, sum(q >= p))]"},
        ),
        Mistake(
            "you keep every token whose own probability is at least 1 - p: the sum of the kept tokens must reach p",
            {"order[before < p]": "order[: sum(q >= 1 - p)]"},
        ),
        Mistake(
            "you do not normalise the remaining probabilities: divide them by their sum",
            {"return result / result.sum()": "return result"},
        ),
        Mistake(
            "you return the probabilities in sorted order: entry i must belong to token i",
            {"return result / result.sum()": "return result[order] / result.sum()"},
        ),
        Mistake(
            "you start with the least likely tokens: sort by decreasing probability", {"argsort(-q)": "argsort(q)"}
        ),
        Mistake(
            "you sum the probabilities in the order of the token ids: sort them first",
            {"np.argsort(-q)": "np.arange(len(q))"},
        ),
    ),
    inspect=_inspect_distribution,
    claims=("decoding-samplers",),
    sources=("Ch. 13 ex. 16",),
)
