"""The cache: what is counted is what the formulas say, and a broken store is caught."""

import numpy as np
import pytest
import torch

from glassformer.model.cache import Growing
from glassformer.theory.claims.architecture import caching
from glassformer.theory.claims.claim import Lab
from glassformer.theory.claims.weights.rational import causal, random_heads, random_matrix
from tests.bugs.mutants import MUTANTS


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_counters_are_those_of_the_formulas(steps):
    full, cached = caching.cost(steps, cached=False), caching.cost(steps, cached=True)
    assert full == ({steps * (steps + 1) // 2}, steps * (steps + 1) * (2 * steps + 1) // 6,
                    steps * (steps + 1) * (steps + 2) // 6)  # fmt: skip
    assert cached == ({steps}, steps * (steps + 1) // 2, steps * (steps + 1) // 2)


def test_cached_and_whole_attention_agree_in_fractions_only_under_a_causal_mask():
    rng = np.random.default_rng(1)
    x, layers = random_matrix(rng, 3, 2), [random_heads(rng, 1, 2, 2) for _ in range(2)]
    assert (caching.attend(x, layers, causal(3)) == caching.attend_cached(x, layers)).all()
    assert (caching.attend(x, layers, None) != caching.attend_cached(x, layers)).any()
    last = caching.attend(x, layers[:1], None)[-1]
    assert (last == caching.attend_cached(x, layers[:1])[-1]).all()  # one layer: the last row is right without a mask


def test_a_store_that_swaps_two_keys_is_caught(monkeypatch):
    original = Growing.extend

    def swapped(self, k, v):
        k, v = original(self, k, v)
        return (k.flip(2), v) if k.shape[2] == 2 else (k, v)

    monkeypatch.setattr(Growing, "extend", swapped)
    found = caching.both_ways.__wrapped__("sinusoidal, L=2", torch.float64, 0, 6)
    gaps = (found.cached - found.full).abs().amax(-1)
    assert gaps[0] < 1e-10 < 1e-3 < gaps[1]


def test_an_engine_that_counts_on_wrongly_with_a_cache_is_caught():
    with MUTANTS["positions_shifted_when_cached"]():
        found = caching.both_ways.__wrapped__("sinusoidal, L=2", torch.float64, 0, 6)
    assert (found.cached - found.full).abs().max() > 1e-3


def test_steps_at_position_zero_differ_from_the_second_on():
    found = caching.both_ways.__wrapped__("learned, L=1", torch.float64, 0, 4, stuck=True)
    gaps = (found.cached - found.full).abs().amax(-1)
    assert gaps[0] < 1e-10 < 1e-3 < gaps[1:].min()


def test_a_slow_cache_is_a_warning_and_a_harmful_one_a_failure(monkeypatch):
    for cached_time, passed, warnings in ((0.7, True, 1), (2.0, False, 1), (0.1, True, 0)):
        monkeypatch.setattr(caching, "seconds", lambda cached, t=cached_time: (0.1, t) if cached else (0.11, 1.0))
        [found] = caching._clock(Lab())
        assert found.passed is passed
        assert len(found.evidence["warnings"]) >= warnings
