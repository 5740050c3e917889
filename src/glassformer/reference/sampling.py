"""The exact distribution that a sampler should draw the next token from."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from glassformer.reference.arrays import Array
from glassformer.reference.ops import softmax


def distribution(
    logits: npt.ArrayLike,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    context: Iterable[int] = (),
) -> Array:
    """Probabilities (V,) of the next token: logits (V,) after five filters, in this order.

    Each filter works on what the one before it left, renormalised; a removed token has probability exactly 0.
    1. repetition penalty: the logit of every id in `context` is divided by it if positive, else multiplied (Keskar et
       al. 2019, 4.1). 1 is off.
    2. temperature: logits / temperature. 0 puts all mass on the largest logit, the lowest id of equal ones.
    3. top_k: keeps the k largest, and what equals the k-th (so a tie may keep more). None or 0 is off.
    4. top_p: going down from the most probable, ties by lowest id, keeps the fewest tokens whose sum reaches p; always
       at least one (Holtzman et al. 2020, 3.1). 1 is off.
    5. min_p: keeps what has at least min_p times the probability of the most probable (Nguyen et al. 2024). 0 is off.
    """
    scores = penalize(np.array(logits, dtype=np.float64), repetition_penalty, context)
    _check(scores, temperature, top_k, top_p, min_p)
    if temperature == 0:
        certain = np.zeros_like(scores)
        certain[np.argmax(scores)] = 1  # argmax takes the first of equal ones
        return certain
    scores = scores / temperature
    if top_k:
        kth = np.sort(scores)[-min(top_k, len(scores))]
        scores = np.where(scores < kth, -np.inf, scores)
    if top_p < 1:
        scores = np.where(nucleus(softmax(scores), top_p), scores, -np.inf)
    probabilities = softmax(scores)
    scores = np.where(probabilities >= min_p * probabilities.max(), scores, -np.inf)
    return softmax(scores)


def penalize(scores: Array, penalty: float, context: Iterable[int]) -> Array:
    """Scores with those of the ids in `context` made less likely, once each however often an id occurs."""
    if penalty <= 0:
        raise ValueError(f"repetition_penalty={penalty} must be positive: 1 is off, above 1 discourages.")
    out = scores.copy()
    for token in set(context):
        out[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    return out


def nucleus(probabilities: Array, p: float) -> np.ndarray:
    """Boolean (V,): the smallest set of most probable tokens with total at least p."""
    kept = np.zeros(len(probabilities), dtype=np.bool_)
    total = 0.0
    for token in np.argsort(-probabilities, kind="stable"):
        kept[token] = True
        total += probabilities[token]
        if total >= p:
            break
    return kept


def _check(scores: Array, temperature: float, top_k: int | None, top_p: float, min_p: float) -> None:
    if scores.ndim != 1:
        raise ValueError(f"logits of one place have shape (V,), got {scores.shape}.")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or more.")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k={top_k} must be 0 (off) or more.")
    if not 0 <= top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(f"top_p={top_p} and min_p={min_p} must be in [0, 1].")
