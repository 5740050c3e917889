"""Grokking: the bands of the pilot, the circuit on every input, and a spectrum that tells waves from noise."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer.lens.figures.training import read_log
from glassformer.lens.grokking import (
    GrokRun,
    check_circuit,
    compact_circuit,
    fourier,
    fourier_of_embedding,
    grok,
    quadratic,
)
from glassformer.lens.sites import LensError
from glassformer.model import build
from glassformer.training import open_session, read_run, train
from tests import variants
from tests.sampled import examples


@functools.lru_cache
def run(wd: float, seed: int = 0) -> GrokRun:
    return grok(wd=wd, seed=seed, log_every=250)


def at(record: GrokRun, curve: str, step: int) -> float:
    return getattr(record, curve)[record.steps.index(step)]


def check_bands(decayed: GrokRun, free: GrokRun) -> None:
    """What the claim grokking-weight-norm asks for."""
    assert at(decayed, "train_accuracy", 500) == 1.0
    assert at(decayed, "test_accuracy", 500) < 0.2
    assert decayed.test_accuracy[-1] >= 0.95
    assert decayed.norm[-1] / decayed.peak_norm < 0.95
    assert free.train_accuracy[-1] == 1.0
    assert free.test_accuracy[-1] < 0.3
    assert free.norm[-1] > 1.3 * decayed.norm[-1]


@pytest.mark.slow
def test_with_weight_decay_it_is_memorised_then_understood_and_without_it_never_is():
    check_bands(run(0.5), run(0.0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_bands_hold_for_other_seeds(seed):
    check_bands(run(0.5, seed), run(0.0, seed))


@pytest.mark.slow
def test_units_that_understand_are_pure_waves_and_units_that_memorise_are_not():
    """All fifteen frequencies are used, so the sum over units is flat; each unit for itself is what tells."""
    p, understood, memorised = 31, run(0.5), run(0.0)
    for half in (slice(0, p), slice(p, 2 * p)):
        assert fourier(understood.embedding[half]).concentration > 0.85
        assert fourier(memorised.embedding[half]).concentration < 0.4
    assert fourier(understood.readout.T).concentration > 0.85
    assert fourier(understood.embedding[:p]).effective > 13


def test_a_longer_run_begins_like_a_shorter_one():
    short, long = grok(p=7, steps=20, log_every=10), grok(p=7, steps=30, log_every=10)
    assert long.steps == [0, 10, 20, 30]
    assert long.norm[:3] == short.norm
    assert short.to_dict()["norm"] == short.norm
    assert short.first("norm", 1e9) is None
    assert short.first("train_accuracy", 0.0) == 0


def test_rescaling_changes_the_norm_and_not_the_function():
    """(c W_1, W_2 / c^2) computes the same with quadratic units: a small norm is no property of the function."""
    x, first, last = torch.eye(6, dtype=torch.float64), torch.randn(6, 5).double(), torch.randn(5, 3).double()
    assert torch.allclose(quadratic(x, first, last), quadratic(x, 4 * first, last / 16), rtol=1e-13)
    assert (4 * first).norm() > 2 * first.norm()


@pytest.mark.parametrize("p", [5, 7, 31, 59, 113])
def test_the_compact_circuit_is_right_on_every_input_with_margin_half_p(p):
    found = check_circuit(p)
    assert found.right == p * p
    assert found.smallest_margin == pytest.approx(p / 2, rel=1e-12)
    assert found.largest_margin == pytest.approx(p / 2, rel=1e-12)


@settings(max_examples=examples(25))
@given(p=st.sampled_from([5, 7, 11, 13, 17, 31]), data=st.data())
def test_for_a_prime_any_frequencies_do(p, data):
    frequencies = data.draw(st.lists(st.integers(1, p - 1), min_size=1, max_size=4, unique=True))
    found = check_circuit(p, frequencies)
    assert found.right == p * p
    assert found.smallest_margin > 0


def test_a_frequency_that_shares_a_divisor_with_p_cannot_distinguish_answers():
    assert check_circuit(9, [3]).right == 0
    assert check_circuit(9, [1]).right == 81
    assert compact_circuit(5, [1])[2, 4, 1] == 1.0  # 2 + 4 = 1 mod 5


@pytest.mark.parametrize("p", [7, 8])
def test_a_pure_wave_has_one_frequency_and_power_is_a_share(p):
    c = torch.arange(p).double()
    wave = torch.stack([torch.cos(2 * math.pi * 2 * c / p), torch.sin(2 * math.pi * 2 * c / p)], 1)
    found = fourier(wave)
    assert found.key == [2]
    assert found.share == pytest.approx(1)
    assert found.concentration == pytest.approx(1)
    assert found.effective == pytest.approx(1)
    assert float(fourier(wave + 5).power[0]) > 0.9
    assert fourier(wave + 5).share == pytest.approx(1)


@settings(max_examples=examples(25))
@given(p=st.integers(3, 20), seed=st.integers(0, 99))
def test_powers_are_those_of_a_hand_made_transform_and_obey_parseval(p, seed):
    x = np.random.default_rng(seed).standard_normal((p, 3))
    found = fourier(torch.from_numpy(x))
    k, c = np.arange(p)[:, None], np.arange(p)[None]
    full = np.abs(np.exp(-2j * np.pi * k * c / p) @ x) ** 2
    assert full.sum() == pytest.approx(p * (x**2).sum())
    folded = [full[0].sum()] + [full[[n, p - n] if 2 * n != p else [n]].sum() for n in range(1, p // 2 + 1)]
    assert found.power.tolist() == pytest.approx((np.array(folded) / full.sum()).tolist(), abs=1e-12)
    assert float(found.columns.sum()) == pytest.approx(1)


def test_random_vectors_have_no_key_frequencies():
    found = fourier(torch.randn(31, 128, generator=torch.Generator().manual_seed(0)))
    assert found.key == []
    assert found.share == 0
    assert found.concentration < 0.3
    assert found.effective > 14


def test_the_table_of_a_transformer_is_read_up_to_p():
    model = build(variants.decoder())
    c = torch.arange(29)[:, None]
    with torch.no_grad():
        model.embed.tokens.weight[:29] = torch.cos(2 * math.pi * 3 * c / 29 + torch.arange(variants.D))
    assert fourier_of_embedding(model, 29).key == [3]
    with pytest.raises(LensError, match="at most the 31 tokens"):
        fourier_of_embedding(model, 32)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grok(p=2), "p must be at least 3"),
        (lambda: grok(fraction=1.0), "fraction between 0 and 1"),
        (lambda: grok(wd=-1.0), "the decay not negative"),
        (lambda: fourier(torch.zeros(5, 2)), "have no spectrum"),
        (lambda: compact_circuit(5, []), "makes no circuit"),
        (lambda: compact_circuit(5, [5]), "frequencies not 0 mod p"),
    ],
)
def test_impossible_requests_are_refused_in_words(make, words):
    with pytest.raises(LensError, match=words):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_recipe_of_a_transformer_groks_with_few_frequencies(tmp_path, seed):
    """Known by heart at step 400; of the unseen pairs then about half, the mirror images b + a of seen ones."""
    text = (Path(__file__).parents[2] / "recipes" / "grokking.toml").read_text()
    session = open_session(read_run(text, (f"seed={seed}", f'out="{tmp_path}"')))
    model = train(session.run, session.data).model.eval()
    measured = {event["step"]: event["accuracy"] for event in read_log(tmp_path) if event["event"] == "probe"}
    assert measured[400]["train"] == 1.0
    assert measured[400]["validation"] < 0.7
    assert measured[max(measured)]["validation"] >= 0.95
    found = fourier_of_embedding(model, session.run.task.p)
    assert 3 <= len(found.key) <= 8
    assert found.share > 0.8
    assert found.effective < 9
    assert fourier_of_embedding(build(session.run.model, seed=seed), session.run.task.p).effective > 13
