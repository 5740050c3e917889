"""Exercises about positions: the sinusoidal table, rotary embeddings."""

import numpy as np

from glassformer.theory.exercises.exercise import Arguments, Array, exercise


def sinusoidal(n: int, d: int) -> Array:
    """Return the table of position embeddings, (n, d)."""
    w = 10000.0 ** (-2 * np.arange(d // 2) / d)
    angles = np.arange(n)[:, None] * w
    table = np.zeros((n, d))
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles)
    return table


SINUSOIDAL = exercise("sinusoidal", solve=sinusoidal)


def rope(x: Array, positions: Array, base: float) -> Array:
    """Return x with each row rotated by its position."""
    d = x.shape[1]
    angles = positions[:, None] * base ** (-2 * np.arange(d // 2) / d)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[:, 0::2], x[:, 1::2]
    rotated = np.zeros_like(x)
    rotated[:, 0::2] = first * cos - second * sin
    rotated[:, 1::2] = first * sin + second * cos
    return rotated


def _rope_case(rng: np.random.Generator, d: int, positions: list[int], base: float = 10000.0) -> Arguments:
    return {"x": rng.normal(size=(len(positions), d)), "positions": np.array(positions), "base": base}


ROPE = exercise("rope", solve=rope, draw=_rope_case)


def extrapolation(
    q: Array, k: Array, table: Array, slope: float, distance: int, positions: list[int]
) -> tuple[Array, Array, Array, Array]:
    """Return the scores (learned, sinusoids, rotary, alibi), each (P)."""
    width = np.sqrt(len(q))
    learned, sinusoids, rotary, alibi = [], [], [], []
    waves = sinusoidal(max(positions) + 1, len(q))
    for p in positions:
        s = p - distance
        learned.append((q + table[p]) @ (k + table[s]) / width if p < len(table) else np.nan)
        sinusoids.append((q + waves[p]) @ (k + waves[s]) / width)
        rotated_q = rope(q[None], np.array([p]), 10000.0)[0]
        rotated_k = rope(k[None], np.array([s]), 10000.0)[0]
        rotary.append(rotated_q @ rotated_k / width)
        alibi.append(q @ k / width - slope * distance)
    return np.array(learned), np.array(sinusoids), np.array(rotary), np.array(alibi)


def _extrapolation_case(
    rng: np.random.Generator, d: int, trained: int, distance: int, positions: list[int]
) -> Arguments:
    q, k, table = rng.normal(size=d), rng.normal(size=d), rng.normal(size=(trained, d))
    slope = float(rng.uniform(0.1, 0.5))
    return {"q": q, "k": k, "table": table, "slope": slope, "distance": distance, "positions": positions}


EXTRAPOLATION = exercise("position-extrapolation", solve=extrapolation, draw=_extrapolation_case)
