"""The stream: engines that write elsewhere are caught, slopes are slopes."""

import numpy as np
import pytest

from glassformer.model.attention import Attention
from glassformer.theory.claims.architecture import stream
from glassformer.theory.claims.claim import Lab


def found_by(check, **lab):
    return {f.id: f for f in check(Lab(**lab))}


def test_twelve_layers_and_heads_apart():
    found = found_by(stream.residual_stream_sum)
    assert found["stream = embedding + writes"].evidence["layers"] == 12
    assert found["heads apart"].evidence["terms"] == 1 + 12 * (2 + 1 + 1)  # embedding, two heads, bias, feed-forward
    assert found["post-norm: the same sum is off"].measured > 1


def test_an_engine_whose_writes_differ_from_its_taps_fails(monkeypatch):
    original = Attention.forward
    monkeypatch.setattr(Attention, "forward", lambda self, *args, **named: 1.001 * original(self, *args, **named))
    found = found_by(stream.residual_stream_sum)
    assert not found["stream = embedding + writes"].passed
    assert not found["heads apart"].passed


@pytest.mark.parametrize("power", [-0.5, 0.0, 0.3])
def test_slope_is_the_exponent_of_a_power_law(power):
    assert stream.slope([3 * depth**power for depth in stream.DEPTHS]) == pytest.approx(power, abs=1e-12)


def test_variance_after_a_post_norm_block_is_one(monkeypatch):
    monkeypatch.setattr(stream, "SEEDS", {"pre": 1, "post": 1})
    measure = stream.at_depth.__wrapped__
    assert measure("post", 2, 5).variance == pytest.approx(1, abs=1e-4)
    assert measure("pre", 4, 5).variance > measure("pre", 2, 5).variance > 1.5


def test_geometric_means_are_taken(monkeypatch):
    values = iter([(1.0, 2.0, 1.0), (4.0, 8.0, 1.0)])
    monkeypatch.setattr(stream, "SEEDS", {"pre": 2, "post": 2})
    monkeypatch.setattr(stream, "_backward", lambda config, seed: next(values))
    assert np.allclose(stream.at_depth.__wrapped__("pre", 2, 0), (2.0, 4.0, 1.0))
