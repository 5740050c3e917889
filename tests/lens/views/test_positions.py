"""A model's position scheme as the engine computes it: against closed forms, for every scheme there is."""

import math

import numpy as np
import pytest
import torch

from glassformer import config as c
from glassformer.lens.sites import LensError
from glassformer.lens.views import KINDS, Choice, Subject
from tests.lens.figures.legible import problems
from tests.variants import POSITIONS, decoder, lively


def view(position=None, **changes):
    subject = Subject("tiny", lively(decoder(position=position, **changes))[0])
    return subject, KINDS["positions"](subject, Choice())


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "none"])
def test_every_scheme_is_drawn_legibly(name):
    assert not problems(view(POSITIONS[name])[1].draw())


def test_a_model_without_positions_is_an_error():
    with pytest.raises(LensError, match="tiny has no position scheme"):
        view(c.NoPosition())


def test_learned_positions_are_the_table_without_its_offset_rows():
    subject, shown = view(c.Learned(offset=2))
    assert shown.numbers["vectors"] == subject.model.decoder.position.weight[2:].tolist()


def test_the_rotary_score_of_equal_vectors_is_the_mean_cosine():
    numbers = view(c.Rotary())[1].numbers
    (curve,) = numbers["curves"].values()
    frequencies = [10000.0 ** (-i / 4) for i in (0, 2)]  # a head of 4: two pairs
    expected = [np.mean([math.cos(o * w) for w in frequencies]) for o in numbers["offsets"]]
    assert curve == pytest.approx(expected, abs=1e-12)
    assert numbers["offsets"][-1] == 0  # a decoder looks back


def test_alibi_falls_with_the_distance_by_each_head_s_slope():
    numbers = view(c.Alibi())[1].numbers
    (lines,) = numbers["curves"].values()
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert lines == [[-slope * -o for o in numbers["offsets"]] for slope in slopes]


def test_t5_shows_the_table_by_bucket():
    subject, shown = view(POSITIONS["t5"])
    (lines,) = shown.numbers["curves"].values()
    assert [line[-1] for line in lines] == subject.model.decoder.position.weight[0].tolist()  # offset 0


def test_an_encoder_looks_both_ways():
    parts = {"attention": c.Attention(2), "feedforward": c.Dense(8), "position": c.Alibi()}
    encoder = c.EncoderConfig(vocab_size=31, d_model=14, n_layers=1, max_len=9, **parts)
    numbers = KINDS["positions"](Subject("bert", lively(encoder)[0]), Choice()).numbers
    assert numbers["offsets"] == list(range(-8, 9))


def test_four_schemes_side_by_side():
    subject = Subject("tiny", lively(decoder())[0])
    shown = KINDS["positions"](subject, Choice(show="schemes"))
    curves = list(shown.numbers["curves"].values())
    middle = shown.numbers["offsets"].index(0)
    assert curves[0][middle] == pytest.approx(32)  # 32 pairs of sin² + cos²
    assert curves[1][middle] == pytest.approx(1)
    assert torch.tensor(curves[2])[:, middle].eq(0).all()
    assert curves[3][middle] == 0
    assert not problems(shown.draw())
    waves = KINDS["positions"](subject, Choice(show="sinusoidal"))
    assert np.shape(waves.numbers["vectors"]) == (128, 64)
