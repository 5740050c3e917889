import typing

import pytest

from glassformer import config as c
from glassformer.model import build
from tests import variants


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: c.Learned(offset=-1), "Learned.offset=-1"),
        (lambda: c.Sinusoidal(base=1.0), "base=1.0 must exceed 1"),
        (lambda: c.Sinusoidal(layout="mixed"), "layout='mixed'"),
        (lambda: c.Sinusoidal(spacing="both"), "spacing='both'"),
        (lambda: c.Sinusoidal(offset=-1), "offset=-1"),
        (lambda: c.Rotary(base=0.5), "base=0.5"),
        (lambda: c.Rotary(pairing="pairs"), "pairing='pairs'"),
        (lambda: c.Rotary(fraction=0.0), "fraction=0.0 must be in (0, 1]"),
        (lambda: c.LinearScaling(factor=0.5), "factor=0.5 must be at least 1"),
        (lambda: c.NTKScaling(factor=0.5), "factor=0.5"),
        (lambda: c.YarnScaling(factor=2.0, original_max_len=0), "original_max_len=0"),
        (lambda: c.YarnScaling(factor=2.0, original_max_len=9, beta_fast=1.0), "beta_fast > beta_slow"),
        (lambda: c.Llama3Scaling(factor=2.0, original_max_len=9, high_freq_factor=1.0), "high_freq_factor >"),
        (lambda: c.T5Bias(buckets=6), "buckets=6 must be a multiple of 4"),
        (lambda: c.T5Bias(buckets=32, max_distance=16), "max_distance=16 must exceed buckets/2=16"),
    ],
)
def test_impossible_positions_are_refused(make, words):
    with pytest.raises(c.ConfigError) as caught:
        make()
    assert words in str(caught.value)


def test_rotated_components_of_a_head():
    assert c.Rotary().rotated(64) == 64
    assert c.Rotary(fraction=0.25).rotated(64) == 16


@pytest.mark.parametrize("scheme", typing.get_args(c.Position), ids=lambda scheme: scheme.kind)
def test_what_a_scheme_declares_is_what_the_model_has(scheme):
    """The table and the bias on the scores that the config declares, against the module of the engine."""
    config = variants.decoder(position=scheme())
    position = build(config).decoder.position
    assert [tuple(p.shape) for p in position.parameters()] == (
        [tuple(t.values())] if (t := scheme().table(config)) else []
    )
    assert position.has_bias is scheme.biases_scores
    assert scheme.title
    assert scheme.formula or scheme is c.NoPosition
