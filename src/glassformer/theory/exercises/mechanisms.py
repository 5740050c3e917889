"""Exercises about mechanisms: induction heads, rank collapse, logit attribution, linear attention."""

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise, softmax


def induction_scores(patterns: Array, tokens: list[int]) -> Array:
    """Return the induction score of each head, (H,)."""
    total, count = np.zeros(len(patterns)), 0
    for t, token in enumerate(tokens):
        earlier = [s for s in range(t) if tokens[s] == token]
        if earlier:
            total += patterns[:, t, earlier[-1] + 1]
            count += 1
    return total / count


def _induction_case(rng: np.random.Generator, H: int, before: int, block: int, copies: int = 2) -> Arguments:
    ids = [int(t) for t in rng.permutation(50)]
    tokens = ids[:before] + ids[before : before + block] * copies
    T = len(tokens)
    patterns = np.where(np.tri(T, dtype=bool), 2 * rng.normal(size=(H, T, T)), -np.inf)
    return {"patterns": softmax(patterns), "tokens": tokens}


INDUCTION = exercise("induction-score", solve=induction_scores, draw=_induction_case)


def collapse(x: Array, w_q: Array, w_k: Array, w_v: Array, skip: bool) -> tuple[Array, Array]:
    """Return (ratios, deviations), one of each per layer."""
    ratios, deviations = [], []
    for layer in range(len(w_q)):
        q, k, v = x @ w_q[layer], x @ w_k[layer], x @ w_v[layer]
        mixed = softmax(q @ k.T / np.sqrt(k.shape[-1])) @ v
        x = x + mixed if skip else mixed
        sigma = np.linalg.svd(x, compute_uv=False)
        ratios.append(sigma[1] / sigma[0])
        deviations.append(np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x))
    return np.array(ratios), np.array(deviations)


def _collapse_case(rng: np.random.Generator, T: int, D: int, layers: int, skip: bool = False) -> Arguments:
    w_q, w_k, w_v = (rng.normal(size=(layers, D, D)) / D**0.5 for _ in range(3))
    if skip:  # small enough that the scores of late layers stay moderate
        w_q, w_k, w_v = 0.5 * w_q, 0.5 * w_k, 0.5 * w_v
    return {"x": rng.normal(size=(T, D)), "w_q": w_q, "w_k": w_k, "w_v": w_v, "skip": skip}


COLLAPSE = exercise("rank-collapse", solve=collapse, draw=_collapse_case)


def logit_attribution(terms: Array, gain: Array, head: Array, eps: float) -> Array:
    """Return the part of each logit that each term writes, (C, V)."""
    centred = terms - terms.mean(-1, keepdims=True)
    scale = np.sqrt((centred.sum(0) ** 2).mean() + eps)
    return centred / scale * gain @ head


def _attribution_case(rng: np.random.Generator, C: int, D: int, V: int) -> Arguments:
    terms = rng.normal(size=(C, D)) + rng.normal(size=(C, 1))
    return {"terms": terms, "gain": rng.normal(size=D), "head": rng.normal(size=(D, V)), "eps": 1e-2}


ATTRIBUTION = exercise("logit-attribution", solve=logit_attribution, draw=_attribution_case)


def gradient_step(x: Array, y: Array, w: Array, eta: float, query: Array) -> tuple[Array, Array]:
    """Return (prediction, weights) of one step of gradient descent."""
    weights = eta * (x @ query)
    values = y - x @ w
    return query @ w + weights @ values, weights


def _gradient_case(rng: np.random.Generator, n: int, D: int, m: int, eta: float, zero: bool = False) -> Arguments:
    w = np.zeros((D, m)) if zero else rng.normal(size=(D, m))
    x, y, query = (rng.normal(size=size) for size in ((n, D), (n, m), D))
    return {"x": x, "y": y, "w": w, "eta": eta, "query": query}


GRADIENT = exercise("gradient-step", solve=gradient_step, draw=_gradient_case)
