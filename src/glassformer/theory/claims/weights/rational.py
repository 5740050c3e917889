"""Attention in exact rationals: arrays of Fractions, and a positive rational kernel where softmax has exp.

Softmax is t_ij / sum_l t_il with t = exp(score). Whatever holds for every positive t holds for exp, and with a rational
kernel both sides of an identity are compared without rounding.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

Matrix = NDArray[np.object_]
"""Entries are Fractions."""
Head = tuple[Matrix, Matrix, Matrix, Matrix]
"""Wq (D,K), Wk (D,K), Wv (D,U) and the head's block of Wo (U,D)."""


def rational(values: Any, denominator: int = 1) -> Matrix:
    """An array of whole numbers, divided."""
    array = np.asarray(values)
    return np.array([Fraction(int(v), denominator) for v in array.flat], dtype=object).reshape(array.shape)


def random_matrix(rng: np.random.Generator, rows: int, columns: int) -> Matrix:
    """Whole numbers from -4 to 4, divided by 3."""
    return rational(rng.integers(-4, 5, size=(rows, columns)), 3)


def kernel(score: Fraction) -> Fraction:
    """1 + s + s^2: rational, positive everywhere (it is (s + 1/2)^2 + 3/4) and not symmetric in s."""
    return 1 + score + score * score


def weights(
    q: Matrix,
    k: Matrix,
    allowed: NDArray[np.bool_] | None = None,
    of: Callable[[Fraction], Fraction] = kernel,
    scale: Fraction = Fraction(1, 2),
) -> Matrix:
    """of(scale q_i . k_j), 0 where not allowed, over the sum of its row."""
    t = np.vectorize(of, otypes=[object])(scale * (q @ k.T))
    if allowed is not None:
        t[~allowed] = Fraction(0)
    return t / t.sum(axis=1, keepdims=True)


def multihead(
    x: Matrix, heads: Sequence[Head], allowed: NDArray[np.bool_] | None = None
) -> tuple[list[Matrix], Matrix]:
    """The pattern of each head, and sum_h A_h X Wv_h Wo_h."""
    patterns = [weights(x @ q, x @ k, allowed) for q, k, _, _ in heads]
    parts = [a @ (x @ v) @ o for a, (_, _, v, o) in zip(patterns, heads, strict=True)]
    return patterns, sum(parts[1:], parts[0])


def random_heads(rng: np.random.Generator, n_heads: int, d_model: int, d_head: int) -> list[Head]:
    sizes = ((d_model, d_head),) * 3 + ((d_head, d_model),)
    heads = ([random_matrix(rng, *size) for size in sizes] for _ in range(n_heads))
    return [(q, k, v, o) for q, k, v, o in heads]


def causal(n: int) -> NDArray[np.bool_]:
    return np.tril(np.ones((n, n), dtype=bool))


def rank(matrix: Matrix) -> int:
    """By elimination, without rounding."""
    return int(sympy.Matrix(matrix).rank())


def corners(points: Matrix) -> list[tuple[Fraction, Fraction]]:
    """The convex hull of points in the plane, anticlockwise (Andrew's monotone chain)."""
    ordered = sorted({(x, y) for x, y in points})
    if len(ordered) < 3:
        return ordered

    def chain(sequence: list[tuple[Fraction, Fraction]]) -> list[tuple[Fraction, Fraction]]:
        kept: list[tuple[Fraction, Fraction]] = []
        for point in sequence:
            while len(kept) > 1 and _turn(kept[-2], kept[-1], point) <= 0:
                kept.pop()
            kept.append(point)
        return kept[:-1]

    return chain(ordered) + chain(ordered[::-1])


def in_hull(point: Sequence[Fraction], hull: Sequence[tuple[Fraction, Fraction]]) -> bool:
    """Whether a point is left of, or on, every edge of an anticlockwise polygon; of a segment: between its ends."""
    where = (point[0], point[1])
    between = all(min(c) <= p <= max(c) for p, c in zip(where, zip(*hull, strict=True), strict=True))
    return between and all(_turn(hull[i - 1], hull[i], where) >= 0 for i in range(len(hull)))


def _turn(a: tuple[Fraction, Fraction], b: tuple[Fraction, Fraction], c: tuple[Fraction, Fraction]) -> Fraction:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
