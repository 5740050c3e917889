"""Exercises about choosing the next token: temperature, top-k, top-p."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise, softmax


def _inspect_distribution(arguments: Mapping[str, Any], values: tuple[Any, ...]) -> str:
    p = values[0]
    if not np.isfinite(p).all():
        return "your probabilities contain NaN or infinity because exp overflows: subtract the largest logit first"
    if (p < 0).any():
        return "some of your probabilities are negative"
    return f"your probabilities sum to {p.sum():.6g}, not to 1" if not np.isclose(p.sum(), 1) else ""


def _logits_case(
    rng: np.random.Generator,
    n: int = 5,
    scale: float = 1.0,
    shift: float = 0.0,
    probabilities: Sequence[float] = (),
    **given: float,
) -> Arguments:
    """Draw logits, or take those of given probabilities; tau, k or p are given."""
    logits = np.log(probabilities) if probabilities else scale * rng.normal(size=n) + shift
    return {"logits": logits, **given}


def temperature(logits: Array, tau: float) -> Array:
    """Return probabilities proportional to exp(logits / tau)."""
    scaled = logits / tau
    p = np.exp(scaled - scaled.max())
    return p / p.sum()


TEMPERATURE = exercise("temperature", solve=temperature, draw=_logits_case, inspect=_inspect_distribution)


def top_k(logits: Array, k: int) -> Array:
    """Return softmax over the k largest logits, 0 for other tokens."""
    kept = np.argsort(-logits)[:k]
    p = np.zeros(len(logits))
    p[kept] = np.exp(logits[kept] - logits.max())
    return p / p.sum()


TOP_K = exercise("top-k", solve=top_k, draw=_logits_case, inspect=_inspect_distribution)


def top_p(logits: Array, p: float) -> Array:
    """Return the probabilities of top-p sampling."""
    q = softmax(logits)
    order = np.argsort(-q)
    before = np.cumsum(q[order]) - q[order]
    kept = order[before < p]
    result = np.zeros(len(q))
    result[kept] = q[kept]
    return result / result.sum()


TOP_P = exercise("top-p", solve=top_p, draw=_logits_case, inspect=_inspect_distribution)
