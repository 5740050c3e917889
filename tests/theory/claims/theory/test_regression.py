"""Attention as regression."""

import pytest
import torch

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.theory import regression
from glassformer.theory.claims.theory.attend import attend


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gradient_step_and_attention_agree_from_zero_only(seed):
    error, size = regression._engine_against_autograd(Lab(seed))
    assert error <= 1e-12 * size
    assert regression._engine_against_autograd(Lab(seed, broken=True))[0] > 0.1
    assert regression._fractions_wrong(Lab(seed))[0] == 0
    assert regression._fractions_wrong(Lab(seed, broken=True))[0] > 50


def test_symbolic_step_needs_the_start_at_zero():
    assert regression._one_step_symbolic(started_at_zero=True)
    assert not regression._one_step_symbolic(started_at_zero=False)


def test_smoother_is_attention_although_written_as_a_gaussian():
    q, k, v = regression._regression_data(Lab())
    torch.testing.assert_close(regression._smoother(q[0], k, v), attend(q[:1], k, v)[0])


def test_keys_on_a_circle_have_one_norm_and_gaussian_weights():
    x = torch.linspace(-3, 3, 9, dtype=torch.float64)
    keys = regression._on_circle(x, 0.5, radius=1000.0)
    assert float(keys.norm(dim=1).std()) < 1e-9 * float(keys.norm(dim=1).mean())
    chord = (keys[0] - keys).norm(dim=1)
    torch.testing.assert_close(chord, (x - x[0]).abs() / 0.5, rtol=1e-4, atol=0)


def test_without_normalising_the_smoother_claim_fails():
    failed = [p.id for p in regression.softmax_attention_kernel_smoother(Lab(broken=True)) if not p.passed]
    assert "the weighted mean minimises" in failed
    assert "moving all values moves the output" in failed
