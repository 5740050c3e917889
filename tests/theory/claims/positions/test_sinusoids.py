"""Shifts of waves: the table, the matrices, the numbers of the contract, a broken engine."""

import numpy as np
import pytest

from glassformer.config import Sinusoidal
from glassformer.model import positions
from glassformer.reference.positions import sinusoidal
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.positions import sinusoids as waves


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
def test_the_table_is_the_oracles(layout):
    expected = sinusoidal(Sinusoidal(layout=layout), np.arange(50)[None], 12)[0]
    np.testing.assert_allclose(waves.engine_table(50, 12, layout), expected, atol=1e-13)


def test_shift_matrices_are_a_group():
    for j, k in ((1, 2), (5, -3)):
        np.testing.assert_allclose(
            waves.shift_matrix(j, 10) @ waves.shift_matrix(k, 10), waves.shift_matrix(j + k, 10), atol=1e-15
        )
    np.testing.assert_array_equal(waves.shift_matrix(0, 10), np.eye(10))


def test_the_numbers_of_the_contract():
    shift = {p.id: p for p in waves.shift_rotation(Lab())}
    assert shift["counted from 1, no linear map shifts"].measured == pytest.approx(0.146, abs=5e-4)
    only = {p.id: p for p in waves.sine_only(Lab())}
    assert only["sine only, best map over n = 1..63"].measured == pytest.approx(0.282, abs=5e-4)
    assert only["sine and cosine, the same"].measured < 1e-12


def test_vanishing_is_not_claimed_for_what_does_not():
    import sympy as sp

    a, b = sp.symbols("a b", real=True)
    assert waves.vanishes(sp.sin(a + b) - sp.sin(a) * sp.cos(b) - sp.cos(a) * sp.sin(b))
    assert not waves.vanishes(sp.sin(a + b) - sp.sin(a) * sp.cos(b) + sp.cos(a) * sp.sin(b))


def test_an_engine_whose_cosines_are_sines_fails(monkeypatch):
    whole = positions.sinusoids

    def sines(places, width, spec):
        return whole(places, width, spec).unflatten(-1, (-1, 2))[..., :1].expand(*places.shape, -1, 2).flatten(-2)

    monkeypatch.setattr(positions, "sinusoids", sines)
    assert not all(p.passed for p in waves._shift_engine(Lab()))
