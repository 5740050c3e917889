"""Distribution of the angle: recurrence, quadrature and table."""

import math

import mpmath
import numpy as np
import pytest

from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.matrix import angles


@pytest.mark.parametrize("dimension", [2, 3, 4, 7, 10, 61, 512])
def test_cdf_is_the_regularised_beta_function(dimension):
    t = np.array([0.0, 0.01, 0.2, 0.5, 0.9, 1.0])
    expected = [float(mpmath.betainc(0.5, (dimension - 1) / 2, 0, x * x, regularized=True)) for x in t]
    np.testing.assert_allclose(angles.cosine_cdf(dimension, t), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dimension", [3, 10, 512])
def test_density_integrates_to_one(dimension):
    degrees = np.linspace(0.001, 179.999, 20_001)
    assert np.trapezoid(angles.density(dimension, degrees), degrees) == pytest.approx(1, abs=1e-6)


def test_table_by_quadrature_to_its_last_digit():
    for dimension, stated in angles.TABLE.items():
        found = angles.quadrature(dimension)
        for name, text in stated.items():
            decimals = len(text.partition(".")[2])
            assert abs(found[name] - float(text)) <= 0.5 * 10**-decimals, (dimension, name)


def test_variance_in_closed_form():
    expected = math.degrees(math.sqrt(math.pi**2 / 12 - sum(2 / j**2 for j in (2, 4, 6, 8))))
    assert angles.closed_forms(10)["SD of the angle"] == pytest.approx(expected, rel=1e-12)


def test_axis_vectors_are_always_parallel():
    assert set(np.abs(angles.cosines(np.random.default_rng(0), 9, 50, axis_only=True))) == {1.0}


def test_the_tail_comes_within_half_of_its_bound_and_no_nearer():
    tail = angles._tail(Lab())
    assert tail.evidence["cases"] == 6200
    assert 0.4 < tail.evidence["closest_ratio"] <= 0.5
