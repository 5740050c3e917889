"""The display of a trace: attention maps and the recorded tensors."""

import re
from urllib.parse import unquote

import pytest
import torch

import glassformer as gf
from tests.pages.hostile import assert_static_fragment

SMALL = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 16, "vocab_size": 31, "max_len": 64}


def small(**changes):
    return gf.build(gf.presets.gpt2(**SMALL | changes), seed=0)


def pictures(reader) -> list[str]:
    return [given["alt"] for tag, given in reader.tags if tag == "img"]


def test_a_trace_shows_the_maps_of_every_head_and_all_sites():
    trace = gf.trace(small(), [[1, 2, 3, 4]])
    reader = assert_static_fragment(trace._repr_html_())
    (alt,) = pictures(reader)
    assert alt.startswith("Attention: 2 heads of 2 layers, 4 queries by 4 keys")
    text = "".join(reader.text)
    assert all(name in text for name in trace)
    assert "(B,H,T,S)" in text
    assert "(1, 2, 4, 4)" in text
    assert "<image" in unquote(reader.links[0])


def test_a_trace_without_patterns_is_a_table_that_is_open():
    shown = gf.trace(small(), [1, 2, 3], sites="embed")._repr_html_()
    reader = assert_static_fragment(shown)
    assert "Trace of 1 site over tokens (1, 3)" in "".join(reader.text)
    assert pictures(reader) == []
    assert "<details open>" in shown


def test_an_encoder_decoder_has_three_sheets():
    model = gf.build(
        gf.presets.t5_small(n_layers=1, n_encoder_layers=2, d_model=16, d_ff=16, n_heads=2, vocab_size=31), seed=0
    )
    reader = assert_static_fragment(gf.trace(model, [[1, 2, 3, 4]], target=[[5, 6, 7]])._repr_html_())
    encoder, decoder, cross = pictures(reader)
    assert encoder.startswith("Attention in the encoder: 2 heads of 2 layers, 4 queries by 4 keys")
    assert decoder.startswith("Attention in the decoder: 2 heads of layer 0, 3 queries by 3 keys")
    assert cross.startswith("Cross-attention: 2 heads of layer 0, 3 queries by 4 keys")


def test_a_large_model_shows_what_fits():
    model = small(n_layers=12, n_heads=8, max_len=512)
    tokens = torch.randint(0, 31, (2, 300), generator=torch.Generator().manual_seed(0))
    shown = gf.trace(model, tokens, sites="blocks.*.attention.pattern")._repr_html_()
    (alt,) = pictures(assert_static_fragment(shown))
    assert "the first 8 of 12 layers" in alt


@pytest.mark.parametrize("value", [float("nan"), 3.0])
def test_weights_that_are_no_weights_are_left_out(value):
    edits = {"blocks.*.attention.pattern": lambda _, weights: torch.full_like(weights, value)}
    shown = gf.trace(small(), [1, 2], edits=edits)._repr_html_()
    assert pictures(assert_static_fragment(shown)) == []
    assert re.search(r"recorded tensors", shown)
