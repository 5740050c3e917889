"""Exercises about heads: several heads, one step with a cache."""

import numpy as np

from glassformer.theory.exercises.attention import SCALES
from glassformer.theory.exercises.exercise import Array, Case, exercise, softmax


def multi_head(x: Array, w_q: Array, w_k: Array, w_v: Array, w_o: Array, n_heads: int) -> Array:
    """Apply attention in each head, concatenate the heads, apply w_o."""
    T, D = x.shape
    K = D // n_heads
    q = (x @ w_q).reshape(T, n_heads, K).transpose(1, 0, 2)
    k = (x @ w_k).reshape(T, n_heads, K).transpose(1, 0, 2)
    v = (x @ w_v).reshape(T, n_heads, K).transpose(1, 0, 2)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(k.shape[-1])
    heads = softmax(scores) @ v
    joined = heads.transpose(1, 0, 2).reshape(T, D)
    return joined @ w_o


def _heads_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, D: int, n_heads: int) -> Case:
        w = {name: rng.normal(size=(D, D)) / D**0.5 for name in ("w_q", "w_k", "w_v", "w_o")}
        return Case(label, {"x": rng.normal(size=(T, D)), **w, "n_heads": n_heads})

    return [
        made("6 positions, width 12, 3 heads", 6, 12, 3),
        made("4 positions, width 8, 2 heads", 4, 8, 2),
        made("one head", 5, 6, 1),
        made("as many heads as components", 3, 4, 4),
    ]


HEADS = exercise("multi-head", solve=multi_head, cases=_heads_cases, mistakes=SCALES)


def cache_step(
    x: Array, cache_k: Array, cache_v: Array, w_q: Array, w_k: Array, w_v: Array
) -> tuple[Array, Array, Array]:
    """Return (y, cache_k, cache_v); the caches are one row longer."""
    k = np.vstack([cache_k, x @ w_k])
    v = np.vstack([cache_v, x @ w_v])
    scores = k @ (x @ w_q) / np.sqrt(k.shape[-1])
    y = softmax(scores) @ v
    return y, k, v


def _cache_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, S: int, D: int, K: int, U: int, hint: str = "") -> Case:
        cache = {"cache_k": rng.normal(size=(S, K)), "cache_v": rng.normal(size=(S, U))}
        w = {"w_q": rng.normal(size=(D, K)), "w_k": rng.normal(size=(D, K)), "w_v": rng.normal(size=(D, U))}
        return Case(label, {"x": rng.normal(size=D), **cache, **w}, hint)

    empty = "with an empty cache the token attends only to itself, so y is its own value"
    return [
        made("a cache of 4 tokens", 4, 5, 4, 4),
        made("a cache of 9 tokens, values of width 2", 9, 5, 3, 2),
        made("an empty cache", 0, 5, 4, 3, empty),
    ]


CACHE = exercise("kv-cache", solve=cache_step, cases=_cache_cases, mistakes=SCALES)
