"""Exercises about heads: several heads, one step with a cache."""

import numpy as np

from glassformer.theory.exercises.attention import SCALES
from glassformer.theory.exercises.exercise import Arguments, Array, exercise, softmax


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


def _heads_case(rng: np.random.Generator, T: int, D: int, n_heads: int) -> Arguments:
    w = {name: rng.normal(size=(D, D)) / D**0.5 for name in ("w_q", "w_k", "w_v", "w_o")}
    return {"x": rng.normal(size=(T, D)), **w, "n_heads": n_heads}


HEADS = exercise("multi-head", solve=multi_head, draw=_heads_case, mistakes=SCALES)


def cache_step(
    x: Array, cache_k: Array, cache_v: Array, w_q: Array, w_k: Array, w_v: Array
) -> tuple[Array, Array, Array]:
    """Return (y, cache_k, cache_v); the caches are one row longer."""
    k = np.vstack([cache_k, x @ w_k])
    v = np.vstack([cache_v, x @ w_v])
    scores = k @ (x @ w_q) / np.sqrt(k.shape[-1])
    y = softmax(scores) @ v
    return y, k, v


def _cache_case(rng: np.random.Generator, S: int, D: int, K: int, U: int) -> Arguments:
    cache = {"cache_k": rng.normal(size=(S, K)), "cache_v": rng.normal(size=(S, U))}
    w = {"w_q": rng.normal(size=(D, K)), "w_k": rng.normal(size=(D, K)), "w_v": rng.normal(size=(D, U))}
    return {"x": rng.normal(size=D), **cache, **w}


CACHE = exercise("kv-cache", solve=cache_step, draw=_cache_case, mistakes=SCALES)
