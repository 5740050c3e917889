"""Exponents: the fit finds those of known curves, and what is counted has those of the theory."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glassformer.bench import growth


@given(st.floats(0.2, 2.8), st.floats(0, 5), st.floats(0.1, 9))
def test_the_fit_finds_the_exponent_of_a_power_with_or_without_a_constant(p, a, b):
    n = np.array([1, 2, 4, 8, 16, 32])
    assert growth.fit(n, a + b * n**p) == pytest.approx(p, abs=0.03)


def test_a_constant_does_not_grow():
    assert growth.fit([1, 2, 4, 8], [3.0, 3.0, 3.0, 3.0]) == pytest.approx(0, abs=0.02)


def test_counts_grow_with_the_exponents_of_the_theory():
    cached, again, held = growth.measure(contexts=(64, 128, 256), lengths=(64, 128, 256), batches=(1, 2, 4), rounds=3)
    assert cached.expected == pytest.approx(1, abs=0.02)
    assert 1.1 < again.expected < 2
    assert held.exponent == held.expected == pytest.approx(1, abs=0.02)
    assert held.measured == held.counted
    assert "with a cache" in growth.text([cached, again, held])
    assert cached.to_dict()["limit"] == 1


def test_at_long_lengths_the_counted_exponent_reaches_its_limit():
    from glassformer.sizing import flops

    lengths = (2**14, 2**15, 2**16, 2**17)
    counted = [float(sum(flops(growth.config(2**17), 1, n).needed.values())) for n in lengths]
    assert growth.fit(lengths, counted) == pytest.approx(2, abs=0.03)


def test_a_disturbed_point_takes_the_exponent_away():
    quiet = growth.Curve("a token", "context", "s", (1, 2, 4), (1.0, 2.0, 4.0), (1.0, 2.0, 4.0), 1)
    assert quiet.exponent == pytest.approx(1, abs=0.02)
    wild = dataclasses.replace(quiet, disturbed=(2,))
    assert wild.exponent is None
    assert wild.to_dict()["exponent"] is None
    assert "exponent not measured: disturbed at 2" in growth.text([wild])
    assert "disturbed" not in growth.text([quiet])


@pytest.mark.parametrize(
    ("times", "agree"), [([1, 1.1, 9, 1.15], True), ([1, 1.1, 9, 1.3], False), ([1, 1], False), ([4, 1, 1, 3, 1], True)]
)
def test_the_fastest_rounds_must_agree(monkeypatch, times, agree):
    seconds = iter(map(float, times))
    monkeypatch.setattr(growth, "seconds_of", lambda work: next(seconds))
    assert growth._best(lambda: None, len(times)) == (1.0, agree)
