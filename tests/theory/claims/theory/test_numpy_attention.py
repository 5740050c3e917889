"""Attention in NumPy."""

import math

import numpy as np
import pytest
import torch

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.theory import numpy_attention as na


def _cases(seed=0, shapes=na.FORCED):
    given = [na.inputs(Lab(seed), shape) for shape in shapes]
    return [(x, na.exact_attention(*x)) for x in given]


@pytest.mark.parametrize("attend", [na.scaled_dot_product_attention, na.by_oracle, na.by_engine])
def test_three_implementations_are_within_tolerance(attend):
    assert na.worst_error(attend, _cases(seed=4)) <= 1


def test_fifty_digits_agree_with_torch():
    (q, k, v), exact = _cases()[1]
    peer = torch.nn.functional.scaled_dot_product_attention(*(torch.from_numpy(x) for x in (q, k, v)))
    np.testing.assert_allclose(exact, peer.numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", na.MUTANTS)
def test_each_mutant_is_caught_on_the_forced_shapes_alone(name):
    assert na.worst_error(na.MUTANTS[name], _cases()) > 1e6


def test_a_wrong_shape_or_a_number_that_is_none_is_infinitely_wrong():
    cases = _cases()
    assert na.worst_error(lambda q, k, v: v, cases) == math.inf
    assert na.worst_error(lambda q, k, v: np.full((len(q), v.shape[1]), np.nan), cases) == math.inf


def test_naive_exponentials_overflow_and_the_shifted_ones_do_not():
    q, k, v = (np.full((2, 2), x) for x in (1e4, 1.0, 3.0))
    assert np.allclose(na.scaled_dot_product_attention(q, k, v), 3.0)
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(q @ k.T)).all()


def test_permutation_errors_see_a_head_that_knows_positions():
    def positional(q, k, v):
        return na.scaled_dot_product_attention(q + np.arange(len(q))[:, None], k, v)

    assert na.permutation_errors(positional, _cases())["rows of Q alone"] > 1e6


def test_shapes_include_the_awkward_ones():
    made = na.shapes(Lab())
    assert len(made) == 20
    assert any(n_q != n_k for n_q, n_k, _, _ in made)
    assert any(d_k != d_v for *_, d_k, d_v in made)
    assert any(n_k == d_k > 1 for _, n_k, d_k, _ in made)
    assert any(d_k == 1 for _, _, d_k, _ in made)
