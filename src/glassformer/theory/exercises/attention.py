"""Exercises about attention: one head, the causal mask, several heads, one step with a cache."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Case, Exercise, Mistake, softmax

Array = np.ndarray


def _scale(width: int, kind: str, other: int = 1) -> float:
    return {"root": width**-0.5, "none": 1.0, "whole": 1 / width, "times": width**0.5, "other": other**-0.5}[kind]


def _scores(q: Array, k: Array, scale: str, other: int = 1) -> Array:
    return np.asarray(q @ k.T * _scale(q.shape[-1], scale, other))


SCALES = (
    Mistake("you do not scale the scores: divide q kᵀ by √K, the square root of the key width", {"scale": "none"}),
    Mistake("you divide the scores by the key width K: divide by its square root √K", {"scale": "whole"}),
    Mistake("you multiply the scores by √K: divide by it", {"scale": "times"}),
)


def attention(
    q: Array, k: Array, v: Array, *, scale: str = "root", axis: int = -1, weights: str = "softmax", shift: bool = True
) -> tuple[Array, Array]:
    """Return (output, weights): softmax(q kᵀ / √K) v, and the softmax."""
    scores = _scores(q, k, scale, v.shape[-1])
    match weights:
        case "softmax":
            pattern = softmax(scores, axis, shift)
        case "unnormalised":
            pattern = np.exp(scores)
        case "sum":
            pattern = scores / scores.sum(-1, keepdims=True)
        case _:
            pattern = softmax(softmax(scores, axis), axis)
    return pattern @ v, pattern


def _attention_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, S: int, K: int, U: int, size: float = 1.0, hint: str = "") -> Case:
        q, k, v = rng.normal(size=(T, K)) * size, rng.normal(size=(S, K)) * size, rng.normal(size=(S, U))
        return Case(label, {"q": q, "k": k, "v": v}, hint)

    return [
        made("5 queries and 5 keys", 5, 5, 4, 4),
        made("3 queries, 7 keys, width 5, values of width 2", 3, 7, 5, 2),
        made("one query", 1, 6, 3, 3),
        made("scores around 1000", 4, 4, 4, 3, 40.0, "large scores overflow: subtract each row's maximum before exp"),
    ]


def _inspect_pattern(arguments: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    pattern = values[-1]
    if not np.isfinite(pattern).all():
        return ""
    if not np.allclose(pattern.sum(-1), 1):
        if pattern.shape[0] > 1 and np.allclose(pattern.sum(0), 1):
            return "your weights sum to 1 over queries, not over keys: softmax along axis -1"
        return f"the rows of your weights do not sum to 1 (the first sums to {pattern[0].sum():.4g})"
    return "some of your weights are negative: the output of softmax never is" if (pattern < 0).any() else ""


ATTENTION = Exercise(
    id="attention",
    title="Scaled dot-product attention",
    problem="""\
Write attention for one head, without a mask, in NumPy.

  q (T, K)  a query for each of T positions
  k (S, K)  a key for each of S positions
  v (S, U)  a value for each of S positions

The score of query t and key s is their dot product divided by √K. Apply softmax over the keys, so that each row of
scores becomes a row of weights that sums to 1. The output at position t is the average of the values under these
weights.

Return the output (T, U) and the weights (T, S). Scores may be large, so exp must not overflow.""",
    solve=attention,
    cases=_attention_cases,
    returns=("output", "weights"),
    mistakes=(
        *SCALES,
        Mistake("you divide by the square root of the value width U: use the key width K", {"scale": "other"}),
        Mistake("your weights sum to 1 over queries, not over keys: softmax along axis -1", {"axis": 0}),
        Mistake(
            "your weights are not normalised: divide exp(score) by its sum over the keys", {"weights": "unnormalised"}
        ),
        Mistake("you divide the scores by their sum: softmax takes exp of the scores first", {"weights": "sum"}),
        Mistake("you apply softmax twice: once is enough", {"weights": "twice"}),
        Mistake("exp of a large score overflows: subtract each row's maximum before exp", {"shift": False}),
    ),
    inspect=_inspect_pattern,
    claims=("numpy-attention", "softmax-row-stochastic", "unit-variance-scaling"),
)


def causal_weights(
    scores: Array, *, sees: str = "past", fill: str = "before", axis: int = -1, shift: bool = True
) -> Array:
    """Return softmax over the keys that are not later than the query."""
    T = len(scores)
    masks = {"past": np.tri(T), "ahead": np.tri(T, k=1), "strict": np.tri(T, k=-1), "future": np.tri(T).T}
    allowed = masks[sees].astype(bool) if sees != "all" else np.ones((T, T), bool)
    with np.errstate(invalid="ignore"):
        if fill == "before":
            return softmax(np.where(allowed, scores, -np.inf), axis, shift)
        if fill == "zero":
            return softmax(np.where(allowed, scores, 0.0), axis, shift)
        return softmax(scores, axis, shift) * allowed  # after, and not normalised again


def _mask_cases(rng: np.random.Generator) -> list[Case]:
    large = "a masked score must be below every other score: use -inf, and subtract the row maximum before exp"
    return [
        Case("5 positions", {"scores": rng.normal(size=(5, 5))}),
        Case("one position", {"scores": rng.normal(size=(1, 1))}),
        Case("8 positions and very negative scores", {"scores": rng.normal(size=(8, 8)) * 5 - 2000}, large),
        Case("4 positions and scores around 1000", {"scores": 1000 * rng.normal(size=(4, 4))}, large),
    ]


def _inspect_mask(arguments: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    pattern = values[0]
    if np.isnan(pattern).any():
        return "your weights contain NaN: every key of some row is masked, or exp of a large score overflows"
    ahead = np.triu(pattern, 1)
    if (ahead != 0).any():
        t, s = (int(i[0]) for i in np.nonzero(ahead))
        return f"query {t} gives the weight {pattern[t, s]:.3g} to key {s}, which is a later position"
    return _inspect_pattern(arguments, values)


CAUSAL = Exercise(
    id="causal-mask",
    title="The causal mask",
    problem="""\
In a decoder, a position must not attend to later positions. Given the scores (T, T), one row per query and one column
per key, return the attention weights (T, T). Row t is the softmax over the keys 0 to t, and exactly 0 for later keys.
A query attends to its own position too.

Scores may be large positive or large negative numbers.""",
    solve=causal_weights,
    cases=_mask_cases,
    returns=("weights",),
    mistakes=(
        Mistake("you do not apply a mask: every query attends to every key", {"sees": "all"}),
        Mistake(
            "your mask is transposed: queries attend to later positions instead of earlier ones", {"sees": "future"}
        ),
        Mistake(
            "your mask hides a query's own position, and the first query sees nothing: keep the diagonal",
            {"sees": "strict"},
        ),
        Mistake("your mask is off by one: each query attends to one later key", {"sees": "ahead"}),
        Mistake("you set masked scores to 0 or close to 0, and exp(0) is 1: set them to -inf", {"fill": "zero"}),
        Mistake(
            "you mask after softmax, so the rows no longer sum to 1: mask the scores before softmax", {"fill": "after"}
        ),
        Mistake("your weights sum to 1 over queries, not over keys: softmax along axis -1", {"axis": 0}),
        Mistake(
            "exp overflows for large scores and underflows for very negative ones: subtract each row's maximum first",
            {"shift": False},
        ),
    ),
    inspect=_inspect_mask,
    claims=("architecture-masks", "encoder-from-decoder"),
)


def multi_head(
    x: Array,
    w_q: Array,
    w_k: Array,
    w_v: Array,
    w_o: Array,
    n_heads: int,
    *,
    scale: str = "root",
    heads: str = "blocks",
    join: str = "concatenate",
    project: bool = True,
    transposed: bool = False,
    axis: int = -1,
) -> Array:
    """Apply attention in each head, concatenate the heads, apply w_o."""
    T, D = x.shape
    K = D // n_heads

    def parts(w: Array) -> Array:
        y = x @ (w.T if transposed else w)
        if heads == "blocks":
            return y.reshape(T, n_heads, K).transpose(1, 0, 2)
        if heads == "interleaved":
            return y.reshape(T, K, n_heads).transpose(2, 0, 1)
        return y.reshape(n_heads, T, K)  # mixes positions and heads

    q, k, v = parts(w_q), parts(w_k), parts(w_v)
    scores = q @ k.transpose(0, 2, 1) * _scale(K, scale, D)
    out = softmax(scores, axis) @ v
    if join == "concatenate":
        joined = out.transpose(1, 0, 2).reshape(T, D)
    elif join == "reshape":
        joined = out.reshape(T, D)
    else:
        joined = np.tile(out.mean(0), n_heads)
    return joined @ (w_o.T if transposed else w_o) if project else joined


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
        Mistake("you divide by √D, the width of the model: divide by √K, the width of a head", {"scale": "other"}),
        Mistake(
            "your heads take every n_heads-th column: head h has K neighbouring columns from h·K on",
            {"heads": "interleaved"},
        ),
        Mistake(
            "you reshape (T, D) to (n_heads, T, K) directly, which mixes positions: reshape to (T, n_heads, K), then "
            "move the head axis to the front",
            {"heads": "mixed"},
        ),
        Mistake(
            "you concatenate the heads without moving the head axis back: transpose to (T, n_heads, K) before "
            "you reshape to (T, D)",
            {"join": "reshape"},
        ),
        Mistake("you average the heads: concatenate them", {"join": "mean"}),
        Mistake("you leave out w_o", {"project": False}),
        Mistake("you apply the matrices transposed: queries are x @ w_q", {"transposed": True}),
        Mistake("your weights sum to 1 over queries, not over keys: softmax along axis -1", {"axis": -2}),
    ),
    claims=("multihead-block-sum", "multihead-value-output-merge", "multihead-separation"),
)


def cache_step(
    x: Array,
    cache_k: Array,
    cache_v: Array,
    w_q: Array,
    w_k: Array,
    w_v: Array,
    *,
    scale: str = "root",
    order: str = "end",
    sees: str = "itself",
    kept: bool = True,
) -> tuple[Array, Array, Array]:
    """Return (y, cache_k, cache_v); the caches are one row longer."""
    q, k, v = x @ w_q, x @ w_k, x @ w_v

    def joined(old: Array, new: Array) -> Array:
        return np.vstack([old, new[None]] if order == "end" else [new[None], old])

    keys, values = joined(cache_k, k), joined(cache_v, v)
    seen = (keys, values) if sees == "itself" or not len(cache_k) else (cache_k, cache_v)
    y = softmax(_scores(q[None], seen[0], scale)[0]) @ seen[1]
    return (y, keys, values) if kept else (y, cache_k, cache_v)


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
            {"sees": "past"},
        ),
        Mistake("you put the new token at the front of the cache: it belongs at the end", {"order": "front"}),
        Mistake("you return the old cache: the new key and value are lost for the next step", {"kept": False}),
    ),
    claims=("kv-cache-exact", "kv-cache-validity", "kv-cache-cost"),
)
