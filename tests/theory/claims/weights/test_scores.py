"""Moments by expansion, samplers with the law they claim, and the scale of the engine."""

import math

import numpy as np
import pytest

from glassformer import config as c
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.weights import scores
from glassformer.theory.claims.weights.samples import dkw_threshold


@pytest.mark.parametrize("width", [1, 3, 6])
def test_moments_are_those_of_the_statement(width):
    assert [scores.moment(width, power) for power in (1, 2, 3, 4)] == [0, width, 0, 3 * width**2 + 6 * width]
    assert scores.moment(width, 2, same=True) == width**2 + 2 * width


def test_a_product_drawn_through_a_length_has_the_law_of_one_drawn_in_full():
    rng = np.random.default_rng(0)
    direct = (rng.standard_normal((20_000, 64)) * rng.standard_normal((20_000, 64))).sum(1)
    short = scores.gaussian_products(Lab(seed=1), 64, 20_000)
    both = np.sort(np.concatenate([direct, short]))
    one, other = (np.searchsorted(np.sort(x), both, side="right") / 20_000 for x in (direct, short))
    assert np.abs(one - other).max() < 2 * dkw_threshold(20_000)


def test_sign_products_have_the_parity_and_range_of_sums_of_signs():
    products = scores.sign_products(np.random.default_rng(0), 64, 1000)
    assert set(products % 2) == {0.0}
    assert np.abs(products).max() <= 64
    assert (scores.sign_products(np.random.default_rng(0), 64, 10, same=True) == 64).all()


@pytest.mark.parametrize(("width", "expected"), [(16, 0.0308), (64, 0.0289), (512, 0.0284)])
def test_bounds_of_the_sampling_check_are_the_stated_ones(width, expected):
    bound = 2 * math.sqrt((2 + 6 / width) * scores.GROUPS / scores.SAMPLES)
    assert bound == pytest.approx(expected, abs=5e-5)
    assert math.exp(-scores.GROUPS / 8) < 1e-6


def test_an_engine_that_forgets_the_scale_is_caught(monkeypatch):
    monkeypatch.setattr(scores, "QUERIES", 400)
    monkeypatch.setattr(c.ModelConfig, "scale", property(lambda config: 1.0))
    found = {f.id: f for f in scores.unit_variance(Lab())}
    assert not any(found[f"scaled, d={d}"].passed for d in scores.WIDTHS)
    assert found["unscaled, d=256"].passed


def test_the_largest_of_25600_unscaled_scores_is_far_from_overflow(monkeypatch):
    monkeypatch.setattr(scores, "QUERIES", 400)
    monkeypatch.setattr(scores, "WIDTHS", (16, 64, 256))
    found = scores.statistics(Lab())["unscaled"][64]["largest score"]
    assert 25 < found.max() < 50
