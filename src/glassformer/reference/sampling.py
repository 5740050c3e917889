"""The exact distribution from which a sampler draws the next token."""

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
    """Return the probabilities (V,) of the next token: logits (V,) after five steps, in this order.

    1. `repetition_penalty`: the logit of every id in `context` is divided by the penalty if positive, otherwise
       multiplied by it (Keskar et al. 2019, section 4.1). 1 disables it.
    2. `temperature`: logits / temperature. 0 is greedy: the most likely token gets probability 1; ties go to the lowest
       id.
    3. `top_k`: keep the k largest logits, and all that equal the k-th, so a tie can keep more. None or 0 disables it.
    4. `top_p`: keep the fewest most likely tokens whose probabilities sum to at least p, always at least one; ties go
       to the lowest id (Holtzman et al. 2020, section 3.1). 1 disables it.
    5. `min_p`: keep the tokens with at least min_p times the probability of the most likely token (Nguyen et al. 2024).
       0 disables it.

    Each filter reads the distribution that the previous one left, renormalized. A removed token has probability exactly
    0.
    """
    scores = penalize(np.array(logits, dtype=np.float64), repetition_penalty, context)
    _check(scores, temperature, top_k, top_p, min_p)
    if temperature == 0:
        one_hot = np.zeros_like(scores)
        one_hot[np.argmax(scores)] = 1  # in a tie argmax returns the first
        return one_hot
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
    """Apply the repetition penalty to the ids in `context`, once per id, however often it occurs."""
    if penalty <= 0:
        raise ValueError(
            f"repetition_penalty={penalty} must be positive: 1 disables it, larger values discourage repetition."
        )
    out = scores.copy()
    for token in set(context):
        out[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    return out


def nucleus(probabilities: Array, p: float) -> np.ndarray:
    """Return a mask (V,) of the nucleus: the smallest set of most likely tokens with total probability at least p."""
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
        raise ValueError(f"logits must have shape (V,), the logits of one position, got {scores.shape}.")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must be 0 (greedy) or more.")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k={top_k} must be 0 (off) or more.")
    if not 0 <= top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(f"top_p={top_p} and min_p={min_p} must both be between 0 and 1.")
