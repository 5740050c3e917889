"""Exercises about choosing the next token: temperature, top-k, top-p."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, exercise, softmax


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


TEMPERATURE = exercise(
    "temperature",
    solve=temperature,
    cases=lambda rng: [
        Case("tau 0.5", {"logits": rng.normal(size=6), "tau": 0.5}),
        Case("tau 2", {"logits": 3 * rng.normal(size=6), "tau": 2.0}),
        Case("tau 1", {"logits": rng.normal(size=4), "tau": 1.0}),
        _overflowing(rng, tau=0.7),
    ],
    inspect=_inspect_distribution,
)


def top_k(logits: Array, k: int) -> Array:
    """Return softmax over the k largest logits, 0 for other tokens."""
    kept = np.argsort(-logits)[:k]
    p = np.zeros(len(logits))
    p[kept] = np.exp(logits[kept] - logits.max())
    return p / p.sum()


TOP_K = exercise(
    "top-k",
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
    inspect=_inspect_distribution,
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


TOP_P = exercise("top-p", solve=top_p, cases=_nucleus_cases, inspect=_inspect_distribution)
