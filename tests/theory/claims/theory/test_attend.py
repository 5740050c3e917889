"""The engine's attention on bare matrices."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glassformer.theory.claims.theory.attend import NoSoftmax, attend, numerical_rank


def _drawn(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_softmax_and_linear_attention_are_their_definitions():
    q, k, v = _drawn((3, 2), (5, 2), (5, 7))
    torch.testing.assert_close(attend(q, k, v, 0.3), (0.3 * q @ k.T).softmax(-1) @ v)
    torch.testing.assert_close(attend(q, k, v, 0.3, linear=True), 0.3 * q @ k.T @ v)


def test_without_scores_the_pattern_cannot_be_replaced():
    with pytest.raises(AssertionError, match="scores come before"):
        NoSoftmax()("blocks.0.attention.pattern", torch.zeros(1))


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_rank_of_a_product_of_random_factors_is_its_inner_width(rows, inner, columns):
    a, b = _drawn((rows, inner), (inner, columns))
    assert numerical_rank(a @ b) == min(rows, inner, columns)
