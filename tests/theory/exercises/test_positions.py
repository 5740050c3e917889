"""The solutions about positions against the oracle."""

import numpy as np
import pytest

from glassformer.config import Rotary, Sinusoidal
from glassformer.reference import positions as oracle
from glassformer.theory.exercises import positions as module


@pytest.mark.parametrize(("n", "d"), [(1, 2), (7, 8), (40, 12)])
def test_the_sinusoidal_table_is_the_oracles(n, d):
    expected = oracle.sinusoidal(Sinusoidal(), np.arange(n)[None], d)[0]
    assert np.allclose(module.sinusoidal(n, d), expected, atol=1e-13)


@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_rotations_are_the_oracles(base):
    x, at = np.random.default_rng(0).normal(size=(4, 6)), np.array([3, 0, 11, 5])
    rotary = Rotary(base=base, pairing="interleaved")
    cos, sin = oracle.rotary_cos_sin(rotary, 6, at[None])
    expected = oracle.rotate(rotary, x[None, None], cos, sin)[0, 0]
    assert np.allclose(module.rope(x, at, base), expected, atol=1e-13)
