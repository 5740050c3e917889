"""A fit names the formula that made the numbers, and leaves nothing; the wrong formula leaves something."""

import math

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from glassformer import config as c
from glassformer.anatomy import fits
from glassformer.model.positions import Rotation, apply_rotation, rotary_frequencies
from tests.sampled import examples


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 1e-5, 3e-4, 0.1])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_and_its_eps_are_recovered(kind, eps):
    x, w, b = noise(26, 24) * 0.2, noise(24, seed=1), noise(24, seed=2)
    y = F.layer_norm(x, (24,), w, b, eps) if kind == "layer" else F.rms_norm(x, (24,), w, eps)
    found = fits.fit_norm(x, y)
    assert found.norm.kind == kind
    assert found.residual < 1e-9
    assert found.norm.eps == pytest.approx(eps, rel=1e-3) or eps < 1e-9  # 1e-12 is nothing compared with 0.04 at all
    torch.testing.assert_close(found(x), y)


def test_no_norm_is_no_norm_and_noise_fits_nothing():
    x = noise(26, 24)
    assert str(fits.fit_norm(x, x).norm) == "no norm"
    assert fits.fit_norm(x, noise(26, 24, seed=9)).residual > 0.1


@pytest.mark.parametrize("outside", [False, True])
def test_the_unbiased_variance_shows_with_known_weights(outside):
    x, w = noise(26, 24), noise(24, seed=1)
    usual = fits.fit_norm(x, F.layer_norm(x, (24,), w, None, 1e-5))
    y = (x - x.mean(-1, keepdim=True)) * w
    y = y / (x.std(-1, keepdim=True) + 1e-3) if outside else y / (x.var(-1, keepdim=True) + 1e-5).sqrt()
    found, left = fits.norm_with(usual, x, y)
    assert (found.unbiased, found.outside) == (True, outside)
    assert left < 1e-9


@pytest.mark.parametrize("name", fits.ACTIVATIONS)
def test_every_activation_is_distinguished_from_the_others(name):
    x, gate = noise(40, 9) * 2, noise(40, 9, seed=1)
    assert fits.fit_activation([x], fits.ACTIVATIONS[name](x)) == (name, 0.0)
    found, left = fits.fit_activation([gate, x], fits.ACTIVATIONS[name](x) * gate)
    assert left == 0.0
    assert name == "no activation" or found == f"{name} of the second projection as gate"


@hypothesis.settings(max_examples=examples(20))
@hypothesis.given(
    st.sampled_from(["halves", "interleaved"]),
    st.sampled_from([100.0, 10000.0, 500000.0]),
    st.sampled_from([4, 8, 12]),
    st.integers(-2, 3),
    st.sampled_from([1.0, 0.35]),
)
def test_a_rotation_is_recovered_from_what_it_did(pairing, base, rotated, start, factor):
    flat = noise(2, 3, 13, 12)
    frequencies, _ = rotary_frequencies(c.Rotary(base=base), rotated, torch.device("cpu"))
    angles = (torch.arange(13) + start)[:, None] * frequencies
    turned = apply_rotation(flat, Rotation(angles.cos()[None, None], angles.sin()[None, None], pairing)) * factor
    found = fits.fit_rotation(flat, turned)
    assert found is not None
    assert found.residual < 1e-9
    assert found.pairing == pairing
    assert found.rotated == rotated
    assert found.base == pytest.approx(base, rel=1e-6)
    assert found.start == pytest.approx(start, abs=1e-9)
    torch.testing.assert_close(fits.turn(turned, found, backwards=True), flat * factor)


def test_what_is_no_rotation_is_not_called_one():
    flat = noise(2, 3, 13, 12)
    assert fits.fit_rotation(flat, noise(2, 3, 13, 12, seed=4)) is None
    still = fits.fit_rotation(flat, flat * 0.3)
    assert still is not None
    assert still.still
    assert str(still) == "no rotation"


def test_factor_and_soft_cap():
    x = noise(300) * 8
    factor, left = fits.fit_factor(x, -0.25 * x)
    assert (factor, left) == (pytest.approx(-0.25), pytest.approx(0, abs=1e-12))
    cap, left = fits.fit_softcap(x, 7.3 * torch.tanh(x / 7.3))
    assert cap == pytest.approx(7.3, rel=1e-6)
    assert left < 1e-7
    assert fits.fit_softcap(x, x.sin())[1] > 0.1


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (torch.ones(5, 5), "every key"),
        (torch.ones(5, 5).tril(), "causal"),
        (torch.ones(5, 5).tril(-1), "causal without itself"),
        (torch.ones(5, 5).tril(1), "causal and one key of the future"),
        (torch.ones(5, 5).triu(1), "only the future (the mask upside down)"),
        (torch.ones(5, 5).tril().triu(-1), "causal, window 2"),
        (torch.ones(3, 5).tril(2), "causal"),
    ],
)
def test_masks_in_words(pattern, words):
    assert fits.describe_mask(pattern.double().expand(2, 3, *pattern.shape)) == words


def test_distance_is_relative_and_never_quiet_about_nan():
    assert fits.distance(torch.tensor([2.0, 2.2]), torch.tensor([2.0, 2.0])) == pytest.approx(0.1)
    assert fits.distance(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
    assert fits.distance(torch.zeros(2), torch.zeros(3)) == math.inf
