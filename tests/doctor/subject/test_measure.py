"""Differences, NaN included, and the two bounds."""

import math

import torch

from glassformer.doctor.subject import measure


def test_gap_takes_nan_against_a_number_for_infinite_and_nan_against_nan_for_none():
    a, b = torch.tensor([1.0, math.nan]), torch.tensor([1.5, math.nan])
    assert measure.gap(a, b) == 0.5
    assert measure.gap(a, torch.tensor([1.0, 2.0])) == math.inf
    assert measure.gap(torch.tensor([math.inf]), torch.tensor([math.inf])) == 0
    assert measure.gap(torch.zeros(2), torch.zeros(3)) == math.inf


def test_bounds_grow_with_the_logits_and_the_noise():
    logits = torch.full((4,), 10.0)
    assert measure.same_shape_bound(logits) == 1e-6
    assert measure.cross_shape_bound(logits, 1e-3) == 0.05
    assert measure.cross_shape_bound(logits, 0.0) == 50 * measure.ulp(torch.float32) * 10


def test_the_root_mean_square_leaves_out_what_is_not_finite():
    assert measure.rms(torch.tensor([3.0, -3.0, math.inf])) == 3


def test_one_is_singular():
    assert [measure.many(n, "key") for n in (0, 1, 2)] == ["0 keys", "1 key", "2 keys"]
    assert [measure.visible_keys(n) for n in (1, 8)] == ["1 key is visible", "8 keys are visible"]
