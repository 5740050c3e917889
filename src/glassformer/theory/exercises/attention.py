"""Exercises about attention: one head, the causal mask, cross-attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Mistake, exercise

SCALED = " / np.sqrt(k.shape[-1])"
SCALES = (
    Mistake("you do not scale the scores: divide q kᵀ by √K, the square root of the key width", {SCALED: ""}),
    Mistake("you divide the scores by the key width K: divide by its square root √K", {SCALED: " / k.shape[-1]"}),
    Mistake("you multiply the scores by √K: divide by it", {SCALED: " * np.sqrt(k.shape[-1])"}),
)
"""Mistakes of every solution that computes `q @ k.T / np.sqrt(k.shape[-1])`."""


def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Return (output, weights): softmax(q kᵀ / √K) v, and the softmax."""
    scores = q @ k.T / np.sqrt(k.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return weights @ v, weights


def _attention_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, S: int, K: int, U: int, size: float = 1.0, hint: str = "") -> Case:
        q, k, v = rng.normal(size=(T, K)) * size, rng.normal(size=(S, K)) * size, rng.normal(size=(S, U))
        return Case(label, {"q": q, "k": k, "v": v}, hint)

    large = made(
        "scores around 1000", 4, 4, 4, 3, 30.0, "large scores overflow: subtract each row's maximum before exp"
    )
    large.arguments["q"][0] = large.arguments["k"][0] = 30.0  # a score of 1800 in every draw
    return [
        made("5 queries and 5 keys", 5, 5, 4, 4),
        made("3 queries, 7 keys, width 5, values of width 2", 3, 7, 5, 2),
        made("one query", 1, 6, 3, 3),
        large,
    ]


def inspect_pattern(arguments: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    """Describe attention weights that are not a distribution over keys."""
    pattern = values[-1]
    if not np.isfinite(pattern).all():
        return ""
    if not np.allclose(pattern.sum(-1), 1):
        if pattern.shape[0] > 1 and np.allclose(pattern.sum(0), 1):
            return "your weights sum to 1 over queries, not over keys: softmax along axis -1"
        return f"the rows of your weights do not sum to 1 (the first sums to {pattern[0].sum():.4g})"
    return "some of your weights are negative: the output of softmax never is" if (pattern < 0).any() else ""


AXIS = Mistake(
    "your weights sum to 1 over queries, not over keys: softmax along axis -1",
    {"max(-1": "max(0", "weights.sum(-1": "weights.sum(0"},
)
OVERFLOW = Mistake(
    "exp overflows for large scores and underflows for very negative ones: subtract each row's maximum first",
    {"scores - scores.max(-1, keepdims=True)": "scores"},
)

ATTENTION = exercise(
    "attention", solve=attention, cases=_attention_cases, inspect=inspect_pattern, mistakes=(*SCALES, AXIS, OVERFLOW)
)


def causal_weights(scores: Array) -> Array:
    """Return softmax over the keys that are not later than the query."""
    T = len(scores)
    allowed = np.tri(T, dtype=bool)
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _mask_cases(rng: np.random.Generator) -> list[Case]:
    large = "a masked score must be below every other score: use -inf, and subtract the row maximum before exp"
    return [
        Case("5 positions", {"scores": rng.normal(size=(5, 5))}),
        Case("one position", {"scores": rng.normal(size=(1, 1))}),
        Case("8 positions and very negative scores", {"scores": rng.normal(size=(8, 8)) * 5 - 2000}, large),
        Case("4 positions and scores around 1000", {"scores": 1000 * rng.normal(size=(4, 4)) + 1500}, large),
    ]


def _inspect_mask(arguments: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    pattern = values[0]
    if np.isnan(pattern).any():
        return "your weights contain NaN: every key of some row is masked, or exp of a large score overflows"
    ahead = np.triu(pattern, 1)
    if (ahead != 0).any():
        t, s = (int(i[0]) for i in np.nonzero(ahead))
        return f"query {t} gives the weight {pattern[t, s]:.3g} to key {s}, which is a later position"
    return inspect_pattern(arguments, values)


CAUSAL = exercise(
    "causal-mask", solve=causal_weights, cases=_mask_cases, inspect=_inspect_mask, mistakes=(AXIS, OVERFLOW)
)


def cross_attention(x: Array, memory: Array, padding: Array, w_q: Array, w_k: Array, w_v: Array) -> Array:
    """Return attention from the target positions to the source."""
    q, k, v = x @ w_q, memory @ w_k, memory @ w_v
    scores = q @ k.T / np.sqrt(k.shape[-1])
    scores = np.where(padding, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return weights @ v


def _cross_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, S: int, D: int, K: int, padded: int = 0, hint: str = "") -> Case:
        w = {name: rng.normal(size=(D, K)) for name in ("w_q", "w_k", "w_v")}
        padding = np.arange(S) >= S - padded
        return Case(
            label, {"x": rng.normal(size=(T, D)), "memory": rng.normal(size=(S, D)), "padding": padding, **w}, hint
        )

    return [
        made("5 target and 5 source positions", 5, 5, 4, 3, padded=2),
        made("3 target and 7 source positions", 3, 7, 5, 2, padded=3),
        made("one target position", 1, 6, 4, 4, padded=1),
        made("no padding", 4, 6, 3, 3, hint="with no padding every source position may be attended to"),
    ]


CROSS = exercise("cross-attention", solve=cross_attention, cases=_cross_cases, mistakes=(*SCALES, AXIS))
