"""Exact rationals: no rounding anywhere, and the right answers."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.theory.claims.weights.rational import (
    causal,
    corners,
    in_hull,
    kernel,
    multihead,
    random_heads,
    random_matrix,
    rank,
    rational,
    weights,
)

RNG = np.random.default_rng(0)


@given(st.fractions())
def test_kernel_is_positive(score):
    assert kernel(score) > 0


def test_rows_of_weights_sum_to_one_exactly():
    q, k = random_matrix(RNG, 4, 2), random_matrix(RNG, 4, 2)
    assert all(row.sum() == Fraction(1) for row in weights(q, k))
    masked = weights(q, k, causal(4))
    assert all(masked[i, j] == 0 for i in range(4) for j in range(i + 1, 4))
    assert all(row.sum() == Fraction(1) for row in masked)


def test_multihead_is_a_sum_over_heads():
    x, heads = random_matrix(RNG, 3, 4), random_heads(RNG, 2, 4, 2)
    parts = [multihead(x, [head])[1] for head in heads]
    assert (multihead(x, heads)[1] == parts[0] + parts[1]).all()


@given(st.lists(st.integers(-3, 3), min_size=12, max_size=12))
def test_rank_agrees_with_singular_values(entries):
    matrix = np.array(entries).reshape(3, 4)
    assert rank(rational(matrix)) == np.linalg.matrix_rank(matrix)


def test_hull_of_a_square_with_a_point_inside():
    points = rational([[0, 0], [2, 0], [2, 2], [0, 2], [1, 1]])
    assert len(corners(points)) == 4
    assert in_hull((Fraction(1), Fraction(2)), corners(points))
    assert not in_hull((Fraction(1), Fraction(2) + Fraction(1, 10**30)), corners(points))


@pytest.mark.parametrize(("point", "inside"), [((1, 1), True), ((3, 3), False), ((1, 0), False)])
def test_hull_of_a_segment(point, inside):
    assert in_hull([Fraction(p) for p in point], corners(rational([[0, 0], [2, 2]]))) is inside
