"""Exercises about attention: one head, the causal mask, cross-attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, Mistake, exercise

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


def _attention_case(rng: np.random.Generator, T: int, S: int, K: int, U: int, size: float = 1.0) -> Arguments:
    q, k, v = rng.normal(size=(T, K)) * size, rng.normal(size=(S, K)) * size, rng.normal(size=(S, U))
    if size > 1:
        q[0] = k[0] = size  # a large score in every draw
    return {"q": q, "k": k, "v": v}


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
    "attention", solve=attention, draw=_attention_case, inspect=inspect_pattern, mistakes=(*SCALES, AXIS, OVERFLOW)
)


def causal_weights(scores: Array) -> Array:
    """Return softmax over the keys that are not later than the query."""
    T = len(scores)
    allowed = np.tri(T, dtype=bool)
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _mask_case(rng: np.random.Generator, T: int, scale: float = 1.0, shift: float = 0.0) -> Arguments:
    return {"scores": rng.normal(size=(T, T)) * scale + shift}


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
    "causal-mask", solve=causal_weights, draw=_mask_case, inspect=_inspect_mask, mistakes=(AXIS, OVERFLOW)
)


def cross_attention(x: Array, memory: Array, padding: Array, w_q: Array, w_k: Array, w_v: Array) -> Array:
    """Return attention from the target positions to the source."""
    q, k, v = x @ w_q, memory @ w_k, memory @ w_v
    scores = q @ k.T / np.sqrt(k.shape[-1])
    scores = np.where(padding, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return weights @ v


def _cross_case(rng: np.random.Generator, T: int, S: int, D: int, K: int, padded: int = 0) -> Arguments:
    w = {name: rng.normal(size=(D, K)) for name in ("w_q", "w_k", "w_v")}
    padding = np.arange(S) >= S - padded
    return {"x": rng.normal(size=(T, D)), "memory": rng.normal(size=(S, D)), "padding": padding, **w}


CROSS = exercise("cross-attention", solve=cross_attention, draw=_cross_case, mistakes=(*SCALES, AXIS))
