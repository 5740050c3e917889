"""Exercises about attention: one head, the causal mask, cross-attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, Exercise, Mistake

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


NORMALISED = "    weights = weights / weights.sum(-1, keepdims=True)\n"
AXIS = Mistake(
    "your weights sum to 1 over queries, not over keys: softmax along axis -1",
    {"max(-1": "max(0", "weights.sum(-1": "weights.sum(0"},
)
OVERFLOW = Mistake(
    "exp overflows for large scores and underflows for very negative ones: subtract each row's maximum first",
    {"scores - scores.max(-1, keepdims=True)": "scores"},
)

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
        Mistake(
            "you divide by the square root of the value width U: use the key width K", {"k.shape[-1]": "v.shape[-1]"}
        ),
        Mistake("you divide by the square root of the number of keys: use the key width K", {"k.shape[-1]": "len(k)"}),
        AXIS,
        Mistake(
            "your weights sum to 1 over the whole matrix: apply softmax to each row on its own",
            {"scores.max(-1, keepdims=True)": "scores.max()", "weights.sum(-1, keepdims=True)": "weights.sum()"},
        ),
        Mistake(
            "your weights are not normalised: divide exp(score) by its sum over the keys",
            {NORMALISED: "", "scores - scores.max(-1, keepdims=True)": "scores"},
        ),
        Mistake(
            "you divide the scores by their sum: softmax takes exp of the scores first",
            {"np.exp(scores - scores.max(-1, keepdims=True))": "scores"},
        ),
        Mistake(
            "you apply softmax twice: once is enough",
            {NORMALISED: f"{NORMALISED}    weights = np.exp(weights)\n{NORMALISED}"},
        ),
        OVERFLOW,
    ),
    inspect=inspect_pattern,
    claims=("numpy-attention", "softmax-row-stochastic", "unit-variance-scaling"),
    sources=("Topic 10 ex. 2.1",),
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


MASK = "np.tri(T, dtype=bool)"
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
        Mistake("you do not apply a mask: every query attends to every key", {MASK: "True"}),
        Mistake(
            "your mask is transposed: queries attend to later positions instead of earlier ones", {MASK: f"{MASK}.T"}
        ),
        Mistake(
            "your mask hides a query's own position, and the first query sees nothing: keep the diagonal",
            {MASK: "np.tri(T, k=-1, dtype=bool)"},
        ),
        Mistake("your mask is off by one: each query attends to one later key", {MASK: "np.tri(T, k=1, dtype=bool)"}),
        Mistake("you set masked scores to 0 or close to 0, and exp(0) is 1: set them to -inf", {"-np.inf": "0.0"}),
        Mistake(
            "you mask after softmax, so the rows no longer sum to 1: mask the scores before softmax",
            {
                "    scores = np.where(allowed, scores, -np.inf)\n": "",
                "return weights / weights.sum(-1, keepdims=True)": (
                    "return weights / weights.sum(-1, keepdims=True) * allowed"
                ),
            },
        ),
        AXIS,
        OVERFLOW,
    ),
    inspect=_inspect_mask,
    claims=("architecture-masks", "encoder-from-decoder"),
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


CROSS = Exercise(
    id="cross-attention",
    title="Cross-attention",
    problem="""\
In an encoder-decoder, every block of the decoder also attends to the outputs of the encoder. For one head:

  x (T, D)                     the decoder's residual stream: it makes the queries
  memory (S, D)                the encoder's outputs: they make the keys and the values
  padding (S)                  True where the source has padding, which must get the weight 0
  w_q, w_k, w_v (D, K)         applied from the right: queries are x @ w_q

Divide the scores by √K. There is no causal mask: the source is complete before the first target token is written.

Return the output (T, K).""",
    solve=cross_attention,
    cases=_cross_cases,
    returns=("output",),
    mistakes=(
        *SCALES,
        Mistake(
            "you attend to padding: set the scores of padded source positions to -inf before softmax",
            {"    scores = np.where(padding, -np.inf, scores)\n": ""},
        ),
        Mistake(
            "you use the padding the wrong way round: True marks the positions to hide",
            {"np.where(padding, -np.inf, scores)": "np.where(padding, scores, -np.inf)"},
        ),
        Mistake(
            "you apply a causal mask: every target position may attend to the whole source",
            {"np.where(padding,": "np.where(padding | ~np.tri(*scores.shape, dtype=bool),"},
        ),
        Mistake(
            "you attend from the source to the target: queries come from x, keys and values from memory",
            {
                "x @ w_q, memory @ w_k, memory @ w_v": "memory @ w_q, x @ w_k, x @ w_v",
                "np.where(padding,": "np.where(padding[:, None] & False,",
            },
        ),
        Mistake(
            "you let the decoder attend to itself: keys and values come from memory",
            {
                "memory @ w_k, memory @ w_v": "x @ w_k, x @ w_v",
                "np.where(padding,": "np.where(np.zeros(len(x), bool),",
            },
        ),
        AXIS,
        Mistake(
            "you set the scores of padding to 0, and exp(0) is 1: set them to -inf",
            {"np.where(padding, -np.inf, scores)": "np.where(padding, 0.0, scores)"},
        ),
    ),
    claims=("architecture-masks",),
)
