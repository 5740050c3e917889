"""Exercises about heads: several heads, one step with a cache."""

import numpy as np

from glassformer.theory.exercises.attention import SCALES
from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake, softmax


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


SPLIT = ".reshape(T, n_heads, K).transpose(1, 0, 2)"
JOIN = "heads.transpose(1, 0, 2).reshape(T, D)"
HEADS = Exercise(
    id="multi-head",
    title="Multi-head self-attention",
    problem="""\
Write self-attention with n_heads heads, without a mask and without biases.

  x (T, D)                    the input
  w_q, w_k, w_v, w_o (D, D)   applied from the right: queries are x @ w_q
  n_heads                     divides D; each head has width K = D / n_heads

Head h uses columns h·K to (h+1)·K - 1 of the queries, keys and values. Its scores are divided by √K. Concatenate the
outputs of the heads in the same order, then apply w_o to the result.

Return the output (T, D).""",
    solve=multi_head,
    cases=_heads_cases,
    returns=("output",),
    mistakes=(
        *SCALES,
        Mistake(
            "you divide by √D, the width of the model: divide by √K, the width of a head",
            {"np.sqrt(k.shape[-1])": "np.sqrt(D)"},
        ),
        Mistake(
            "your heads take every n_heads-th column: head h has K neighbouring columns from h·K on",
            {SPLIT: ".reshape(T, K, n_heads).transpose(2, 0, 1)"},
        ),
        Mistake(
            "you reshape (T, D) to (n_heads, T, K) directly, which mixes positions: reshape to (T, n_heads, K), then "
            "move the head axis to the front",
            {SPLIT: ".reshape(n_heads, T, K)"},
        ),
        Mistake(
            "you concatenate the heads without moving the head axis back: transpose to (T, n_heads, K) before "
            "you reshape to (T, D)",
            {JOIN: "heads.reshape(T, D)"},
        ),
        Mistake(
            "you use one head of the full width: split queries, keys and values into n_heads heads",
            {"K = D // n_heads": "n_heads, K = 1, D"},
        ),
        Mistake(
            "you apply a causal mask: in this exercise every position attends to every position",
            {"softmax(scores) @": "softmax(np.where(np.tri(T, dtype=bool), scores, -np.inf)) @"},
        ),
        Mistake("you average the heads: concatenate them", {JOIN: "np.tile(heads.mean(0), n_heads)"}),
        Mistake("you leave out w_o", {"return joined @ w_o": "return joined"}),
        Mistake(
            "you apply the matrices transposed: queries are x @ w_q",
            {"w_q)": "w_q.T)", "w_k)": "w_k.T)", "w_v)": "w_v.T)", "@ w_o": "@ w_o.T"},
        ),
        Mistake(
            "your weights sum to 1 over queries, not over keys: softmax along axis -1",
            {"softmax(scores) @": "softmax(scores, 1) @"},
        ),
    ),
    claims=("multihead-block-sum", "multihead-value-output-merge", "multihead-separation"),
)


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


CACHE = Exercise(
    id="kv-cache",
    title="One step with a key-value cache",
    problem="""\
Compute one step of generation without recomputing the earlier tokens. For one head:

  x (D)                                  the input vector of the new token
  cache_k (S, K), cache_v (S, U)         keys and values of the S tokens before it; S may be 0
  w_q (D, K), w_k (D, K), w_v (D, U)     applied from the right: the query is x @ w_q

Append the new token's key and value at the end of the cache. Then let its query attend to the whole cache, including
the new token, with scores divided by √K.

Return the output (U), the new cache_k (S+1, K) and the new cache_v (S+1, U). Do not modify the input arrays.""",
    solve=cache_step,
    cases=_cache_cases,
    returns=("y", "cache_k", "cache_v"),
    mistakes=(
        *SCALES,
        Mistake(
            "the new token does not attend to itself: append its key and value before you compute attention",
            {"y = softmax(scores) @ v": "n = len(cache_k) or 1\n    y = softmax(scores[:n]) @ v[:n]"},
        ),
        Mistake(
            "you put the new token at the front of the cache: it belongs at the end",
            {"[cache_k, x @ w_k]": "[x @ w_k, cache_k]", "[cache_v, x @ w_v]": "[x @ w_v, cache_v]"},
        ),
        Mistake(
            "you return the old cache: the new key and value are lost for the next step",
            {"return y, k, v": "return y, cache_k, cache_v"},
        ),
        Mistake("you use the key of the new token as its query: the query is x @ w_q", {"(x @ w_q)": "(x @ w_k)"}),
        Mistake(
            "you use the value that was stored last for the new token: append x @ w_v",
            {"[cache_v, x @ w_v]": "[cache_v, cache_v[-1] if len(cache_v) else x @ w_v]"},
        ),
    ),
    claims=("kv-cache-exact", "kv-cache-validity", "kv-cache-cost"),
    sources=("Ch. 13 ex. 17",),
)
