"""Orthogonal inputs: the numbers of the statement, and a formula that the engine agrees with."""

from decimal import Decimal

import pytest

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.weights import orthogonal
from glassformer.theory.claims.weights.orthogonal import STATED, computed, relative_error


def test_the_engine_gives_every_number_of_the_statement():
    for name, value in computed().items():
        decimals = -Decimal(STATED[name]).as_tuple().exponent
        assert round(value, decimals) == float(STATED[name]), name


@pytest.mark.parametrize(("n", "c", "expected"), [(10, 1, 0.809575), (10, 10, 4.305256e-4), (1, 3, 0.0)])
def test_relative_error_for_equal_norms(n, c, expected):
    assert relative_error(n, c) == pytest.approx(expected, rel=1e-6)


def test_attention_with_its_usual_scale_does_not_follow_the_formula(monkeypatch):
    """The formula is for scores x.x; a layer that also divides by sqrt(D) must be distinguished."""
    unscaled = orthogonal.identity
    monkeypatch.setattr(orthogonal, "identity", lambda d_model, scale: unscaled(d_model))
    found = {f.id: f for f in orthogonal.orthogonal_inputs(Lab())}
    assert not found["engine against formula"].passed
