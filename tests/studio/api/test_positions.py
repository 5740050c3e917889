import math

import numpy as np
import pytest
import torch

from glassformer import config as c
from glassformer.model.positions import alibi_slopes, rotary_frequencies, sinusoids, t5_buckets


def test_sinusoids_are_the_engines(ask):
    arrays, meta = ask.tensors("positions", kind="sinusoidal", width=16, base=100.0, length=20, offset=3, pair=2)
    waves = sinusoids(torch.arange(20), 16, c.Sinusoidal(base=100.0)).numpy()
    assert np.allclose(arrays["map"], waves, atol=1e-3)
    middle = list(arrays["offsets"]).index(0)
    assert arrays["curves"][0, middle] == 1
    assert arrays["curves"][0, middle + 7] == pytest.approx(waves[0] @ waves[7] / (waves[0] @ waves[0]), abs=1e-6)
    assert meta["rotation"]["angle"] == pytest.approx(3 * 100.0 ** (-4 / 16))


def test_rotary_rotates_by_its_frequencies(ask):
    arrays, meta = ask.tensors("positions", kind="rotary", width=8, base=50.0, length=12, offset=-5, pair=1)
    frequencies, _ = rotary_frequencies(c.Rotary(base=50.0), 8, torch.device("cpu"))
    wanted = (torch.arange(12)[:, None] * frequencies).cos().numpy()
    assert np.allclose(arrays["map"], wanted, atol=1e-3)
    assert meta["rotation"]["frequency"] == pytest.approx(float(frequencies[1]))
    assert meta["rotation"]["cos"] == pytest.approx(math.cos(-5 * float(frequencies[1])))
    offset = list(arrays["offsets"]).index(4)
    assert arrays["curves"][0, offset] == pytest.approx(float((4 * frequencies).cos().mean()), abs=1e-6)


def test_alibi_costs_by_distance(ask):
    arrays, meta = ask.tensors("positions", kind="alibi", heads=6, length=9)
    assert meta["slopes"] == alibi_slopes(6)
    assert arrays["curves"].shape == (6, 17)
    assert arrays["curves"][2, 0] == pytest.approx(-8 * alibi_slopes(6)[2])
    assert arrays["map"][7, 3] == pytest.approx(-4 * alibi_slopes(6)[0], rel=1e-3)


def test_t5_shows_buckets_or_a_models_trained_biases(ask, models):
    arrays, _ = ask.tensors("positions", kind="t5", length=30)
    assert np.array_equal(arrays["curves"][0], t5_buckets(torch.arange(-29, 30), c.T5Bias(), causal=False).numpy())
    arrays, _ = ask.tensors("positions", kind="t5", length=10, model="pair")
    table = models.get("pair").model.decoder.position.weight.detach().numpy()
    assert arrays["curves"].shape == (4, 19)
    assert np.allclose(arrays["curves"][:, 9], table[0], atol=1e-6)  # offset 0 is bucket 0
    assert "rotary positions, not T5 bias" in ask.refused("positions", kind="t5", model="bard")[1]


def test_learned_positions_are_a_models_own(ask, models):
    arrays, _ = ask.tensors("positions", kind="learned", model="table", length=100)
    table = models.get("table").model.decoder.position.weight.detach().numpy()
    assert np.allclose(arrays["map"], table, atol=1e-3)
    middle = 99
    assert arrays["curves"][0, middle] == pytest.approx(1, abs=1e-6)
    assert np.isnan(arrays["curves"][0, 0])
    assert "name one that has them" in ask.refused("positions", kind="learned")[1]
    assert "not a learned table" in ask.refused("positions", kind="learned", model="bard")[1]


def test_a_pair_must_exist(ask):
    assert "pair 4 does not exist" in ask.refused("positions", kind="rotary", width=8, pair=4)[1]
