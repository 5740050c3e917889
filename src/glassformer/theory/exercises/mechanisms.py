"""Exercises about mechanisms: induction heads, rank collapse, logit attribution, linear attention."""

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, exercise, softmax


def induction_scores(patterns: Array, tokens: list[int]) -> Array:
    """Return the induction score of each head, (H,)."""
    total, count = np.zeros(len(patterns)), 0
    for t, token in enumerate(tokens):
        earlier = [s for s in range(t) if tokens[s] == token]
        if earlier:
            total += patterns[:, t, earlier[-1] + 1]
            count += 1
    return total / count


def _induction_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, H: int, before: int, block: int, copies: int, hint: str = "") -> Case:
        ids = [int(t) for t in rng.permutation(50)]
        tokens = ids[:before] + ids[before : before + block] * copies
        T = len(tokens)
        patterns = np.where(np.tri(T, dtype=bool), 2 * rng.normal(size=(H, T, T)), -np.inf)
        return Case(label, {"patterns": softmax(patterns), "tokens": tokens}, hint)

    return [
        made("a block of 5 and its copy, 3 heads", 3, 0, 5, 2),
        made("3 other tokens first", 2, 3, 4, 2),
        made("three copies", 4, 2, 4, 3, "a token with several earlier occurrences counts the most recent one"),
        made("one head", 1, 4, 6, 2),
    ]


INDUCTION = exercise("induction-score", solve=induction_scores, cases=_induction_cases)


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


def _collapse_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, T: int, D: int, layers: int, skip: bool) -> Case:
        w_q, w_k, w_v = (rng.normal(size=(layers, D, D)) / D**0.5 for _ in range(3))
        if skip:  # small enough that the scores of late layers stay moderate
            w_q, w_k, w_v = 0.5 * w_q, 0.5 * w_k, 0.5 * w_v
        return Case(label, {"x": rng.normal(size=(T, D)), "w_q": w_q, "w_k": w_k, "w_v": w_v, "skip": skip})

    return [
        made("50 layers, 8 tokens, no skip", 8, 12, 50, False),
        made("10 layers with a skip", 8, 12, 10, True),
        made("3 layers, 6 tokens of width 6", 6, 6, 3, False),
    ]


COLLAPSE = exercise("rank-collapse", solve=collapse, cases=_collapse_cases)


def logit_attribution(terms: Array, gain: Array, head: Array, eps: float) -> Array:
    """Return the part of each logit that each term writes, (C, V)."""
    centred = terms - terms.mean(-1, keepdims=True)
    scale = np.sqrt((centred.sum(0) ** 2).mean() + eps)
    return centred / scale * gain @ head


def _attribution_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, C: int, D: int, V: int) -> Case:
        terms = rng.normal(size=(C, D)) + rng.normal(size=(C, 1))
        return Case(label, {"terms": terms, "gain": rng.normal(size=D), "head": rng.normal(size=(D, V)), "eps": 1e-2})

    return [made("5 terms of width 8", 5, 8, 11), made("9 terms", 9, 6, 4), made("the embedding alone", 1, 5, 7)]


ATTRIBUTION = exercise("logit-attribution", solve=logit_attribution, cases=_attribution_cases)


def gradient_step(x: Array, y: Array, w: Array, eta: float, query: Array) -> tuple[Array, Array]:
    """Return (prediction, weights) of one step of gradient descent."""
    weights = eta * (x @ query)
    values = y - x @ w
    return query @ w + weights @ values, weights


def _gradient_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, n: int, D: int, m: int, eta: float, zero: bool) -> Case:
        w = np.zeros((D, m)) if zero else rng.normal(size=(D, m))
        return Case(label, {"x": rng.normal(size=(n, D)), "y": rng.normal(size=(n, m)), "w": w, "eta": eta,
                            "query": rng.normal(size=D)})  # fmt: skip

    return [
        made("6 examples, a start that is not zero", 6, 3, 2, 0.1, False),
        made("a start at zero and step size 1", 5, 4, 3, 1.0, True),
        made("one example", 1, 3, 2, 0.5, False),
    ]


GRADIENT = exercise("gradient-step", solve=gradient_step, cases=_gradient_cases)
