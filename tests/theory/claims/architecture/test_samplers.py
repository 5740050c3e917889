"""Samplers: the helpers against cases known by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from glassformer.generation import sampling
from glassformer.theory.claims.architecture import samplers
from glassformer.theory.claims.claim import Lab


def test_the_smallest_set_by_hand():
    p = [Fraction(1, 10), Fraction(6, 10), Fraction(3, 10)]
    assert samplers.smallest_set(p, Fraction(1, 2)) == {1}
    assert samplers.smallest_set(p, Fraction(6, 10)) == {1}
    assert samplers.smallest_set(p, Fraction(61, 100)) == {1, 2}
    assert samplers.smallest_set(p, Fraction(1)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"), [(3.841, 1, 0.05), (18.307, 10, 0.05), (5.0, 2, math.exp(-2.5))]
)
def test_tail_of_chi_square_as_in_tables(statistic, freedom, tail):
    assert samplers.chi_square_tail(statistic, freedom) == pytest.approx(tail, abs=2e-5)


def test_shares_are_distinct_and_sum_to_one():
    shares = samplers.random_shares(np.random.default_rng(0), 8)
    assert sum(shares) == 1
    assert len(set(shares)) == 8


def test_an_engine_whose_nucleus_stops_too_early_is_caught(monkeypatch):
    def early(logits, p):
        ordered, order = logits.sort(descending=True, stable=True)
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, ordered.softmax(-1).cumsum(-1) > p)
        return logits.masked_fill(dropped, -math.inf)

    monkeypatch.setattr(samplers, "keep_top_p", early)
    assert not {f.id: f for f in samplers._rational(Lab())}["nucleus"].passed


def test_an_engine_that_draws_at_another_temperature_is_caught(monkeypatch):
    original = sampling.distribution
    monkeypatch.setattr(sampling, "distribution", lambda logits, how, seen=None: original(0.9 * logits, how, seen))
    found = {f.id: f for f in samplers._drawn(Lab())}
    assert not found["temperature 0.7: draws"].passed
    assert not found["top-k 4: draws"].passed


def test_the_float_trap_is_on_record():
    found = samplers._nine_tenths(Lab())
    assert found.evidence["running"] == 0.8999999999999999
    assert (found.evidence["exact"], found.evidence["engine"]) == (9, 10)
