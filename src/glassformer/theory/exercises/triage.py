"""Exercises about finding bugs: a generator to diagnose from its logits, and a broken generator to repair."""

from typing import Any

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise, softmax


def _logits(tokens: list[int], w: dict[str, Array], first: int, causal: bool, lost: int = -1) -> Array:
    """Return the logits of a model of two layers. `lost` is a key that no later query finds."""
    T = len(tokens)
    x = w["embed"][tokens] + w["position"][first : first + T]
    allowed = np.tri(T, dtype=bool) if causal else np.ones((T, T), bool)
    if lost >= 0:
        allowed[lost + 1 :, lost] = False
    for layer in range(2):
        q, k, v = x @ w["query"][layer], x @ w["key"][layer], x @ w["value"][layer]
        scores = q @ k.T / np.sqrt(k.shape[-1])
        x = x + np.tanh(softmax(np.where(allowed, scores, -np.inf)) @ v)
    return np.asarray(x @ w["embed"].T)


def _measurements(rng: np.random.Generator, fault: str) -> Arguments:
    """Measure a generator with a fault, as a student would: four runs over the same text."""
    T, V, D = 7, 9, 6
    shapes = {"embed": (V, D), "position": (T + 1, D), "query": (2, D, D), "key": (2, D, D), "value": (2, D, D)}
    w = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    tokens = [int(t) for t in rng.integers(0, V, T)]
    other = [*tokens[:-1], (tokens[-1] + 1 + int(rng.integers(V - 1))) % V]
    causal, first = "M" not in fault, int("P" in fault)
    prefixes = [_logits(tokens[: n + 1], w, first, causal)[-1] for n in range(T)]
    cached = list(prefixes)
    if (
        "C" in fault or "M" in fault
    ):  # a stored key does not change when later tokens arrive, so without a mask it is stale
        cached = [_logits(tokens[: n + 1], w, first, True, n - 2 if "C" in fault else -1)[-1] for n in range(T)]

    def rounded(logits: Any) -> Array:
        """Add what different orders of summation add."""
        return np.asarray(logits) * (1 + 1e-13 * rng.normal(size=np.shape(logits)))

    return {
        "whole": _logits(tokens, w, 0, causal),
        "replaced": _logits(other, w, 0, causal),
        "prefixes": rounded(prefixes),
        "cached": rounded(cached),
    }


def triage(whole: Array, replaced: Array, prefixes: Array, cached: Array) -> int:
    """Return 0 (no fault), 1 (mask), 2 (positions) or 3 (cache)."""
    if np.abs(whole - replaced)[:-1].max() > 1e-9:
        return 1
    if np.abs(whole - prefixes).max() > 1e-9:
        return 2
    if np.abs(prefixes - cached).max() > 1e-9:
        return 3
    return 0


TRIAGE = exercise("triage", solve=triage, draw=_measurements)


def generate(prompt: list[int], w: dict[str, Array], n: int) -> tuple[list[int], Array]:
    """Return (tokens, logits): n new tokens and their logits, (n, V)."""
    text, keys, values, chosen = list(prompt), [], [], []
    for t in range(len(prompt) + n - 1):
        x = w["embed"][text[t]] + w["position"][t]
        keys.append(x @ w["key"])
        values.append(x @ w["value"])
        scores = np.array(keys) @ (x @ w["query"]) / np.sqrt(len(x))
        p = np.exp(scores - scores.max())
        x = x + p @ np.array(values) / p.sum()
        if t >= len(prompt) - 1:
            chosen.append(x @ w["head"])
            text.append(int(np.argmax(chosen[-1])))
    return text[len(prompt) :], np.array(chosen)


def _generate_case(rng: np.random.Generator, length: int, n: int, V: int, D: int) -> Arguments:
    shapes = {"embed": (V, D), "position": (length + n, D), "head": (D, V)}
    w = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    w |= {name: rng.normal(size=(D, D)) / D**0.5 for name in ("query", "key", "value")}
    return {"prompt": [int(t) for t in rng.integers(0, V, length)], "w": w, "n": n}


REPAIR = exercise("repair-generator", solve=generate, draw=_generate_case)
