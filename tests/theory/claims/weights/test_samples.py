"""Statistical bounds: the stated thresholds, and that they notice a wrong distribution."""

import math

import numpy as np
import pytest

from glassformer.theory.claims.weights.samples import dkw_threshold, half_width, largest_gap, median_of_means


def test_threshold_of_twenty_thousand_samples_is_the_stated_one():
    assert dkw_threshold(20_000) == pytest.approx(0.019045, abs=5e-7)


def test_median_of_means_withstands_an_outlier():
    samples = np.ones(1110)
    samples[0] = 1e12
    assert median_of_means(samples, 111) == 1


def test_largest_gap_of_the_best_possible_sample_is_half_a_step():
    assert largest_gap((np.arange(100) + 0.5) / 100) == pytest.approx(0.005)


def test_largest_gap_sees_another_distribution():
    uniform = np.random.default_rng(0).random(20_000)
    assert largest_gap(uniform) < dkw_threshold(20_000) < largest_gap(uniform**1.2)


def test_half_width_covers_and_shrinks():
    draws = np.random.default_rng(0).random((300, 500))
    misses = [abs(row.mean() - 0.5) > half_width(row) for row in draws]
    assert not any(misses)
    assert half_width(draws.ravel()) < half_width(draws[0]) / 10
    assert half_width(np.full(1000, 0.3)) == pytest.approx(7 * math.log(4e6) / (3 * 999))
