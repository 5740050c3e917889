"""Exercises about positions: the sinusoidal table, rotary embeddings."""

import numpy as np

from glassformer.theory.exercises.exercise import Array, Case, exercise


def sinusoidal(n: int, d: int) -> Array:
    """Return the table of position embeddings, (n, d)."""
    w = 10000.0 ** (-2 * np.arange(d // 2) / d)
    angles = np.arange(n)[:, None] * w
    table = np.zeros((n, d))
    table[:, 0::2] = np.sin(angles)
    table[:, 1::2] = np.cos(angles)
    return table


SINUSOIDAL = exercise(
    "sinusoidal",
    solve=sinusoidal,
    cases=lambda rng: [
        Case("6 positions of width 8", {"n": 6, "d": 8}),
        Case("50 positions of width 16", {"n": 50, "d": 16}),
        Case("width 2", {"n": 5, "d": 2}),
        Case("one position", {"n": 1, "d": 6}),
    ],
)


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


def _rope_cases(rng: np.random.Generator) -> list[Case]:
    return [
        Case("4 rows at positions 0 to 3", {"x": rng.normal(size=(4, 6)), "positions": np.arange(4), "base": 10000.0}),
        Case(
            "positions 3, 100, 7",
            {"x": rng.normal(size=(3, 8)), "positions": np.array([3, 100, 7]), "base": 10000.0},
            "use the given positions for the angle, not the row index",
        ),
        Case(
            "base 100",
            {"x": rng.normal(size=(5, 4)), "positions": np.arange(2, 7), "base": 100.0},
            "use the given base, not 10000",
        ),
    ]


ROPE = exercise("rope", solve=rope, cases=_rope_cases)


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


def _extrapolation_cases(rng: np.random.Generator) -> list[Case]:
    def made(label: str, d: int, trained: int, distance: int, positions: list[int]) -> Case:
        q, k, table = rng.normal(size=d), rng.normal(size=d), rng.normal(size=(trained, d))
        slope = float(rng.uniform(0.1, 0.5))
        arguments = {"q": q, "k": k, "table": table, "slope": slope, "distance": distance, "positions": positions}
        return Case(label, arguments)

    return [
        made("8 trained positions, distance 2", 6, 8, 2, [3, 5, 7, 8, 9, 20, 100]),
        made("16 trained positions, distance 5", 8, 16, 5, [5, 10, 15, 16, 40]),
        made("distance 9", 4, 12, 9, [10, 11, 12, 50]),
    ]


EXTRAPOLATION = exercise("position-extrapolation", solve=extrapolation, cases=_extrapolation_cases)
