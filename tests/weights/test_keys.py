"""Entries read what they write, and say what is wrong with a value."""

import pytest

from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Source
from glassformer.weights.hf.gemma import GEMMA2
from glassformer.weights.keys import Derived, Key, activation, flag, integer, nested, number, only, same, simplified

KEYS = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 8}


def read(entry, **data):
    values = {"d_model": 12}
    entry.read(Source(data, None), values)
    values.pop("d_model")
    return values


def test_absent_null_and_given_values():
    key = integer("n", "x.y", 7)
    assert read(key, n=3) == {"x.y": 3}
    assert read(key) == {"x.y": 7}
    assert read(key, n=None) == {}
    assert read(integer("n", "x", lambda values: 4 * values["d_model"], null=same), n=None) == {"x": 48}
    assert read(integer("n", "x", aliases=("m",)), m=5) == {"x": 5}
    with pytest.raises(WeightsError, match="lacks 'n', which has no default"):
        read(integer("n", "x"))
    with pytest.raises(WeightsError, match="n='3', which must be a whole number"):
        read(key, n="3")


def test_flags_numbers_and_activations_are_decoded():
    assert read(flag("parallel", "placement", False, "parallel", "pre"), parallel=True) == {"placement": "parallel"}
    assert read(number("n", "x", decode=lambda value: value**-0.5), n=16) == {"x": 0.25}
    assert read(activation("act", "relu", gelu="gelu_tanh"), act="gelu") == {"feedforward.activation": "gelu_tanh"}
    assert activation("act", "relu", gelu="gelu_tanh").encode("gelu_tanh") == "gelu"
    assert read(Derived("y", lambda values: values["d_model"] ** 2)) == {"y": 144}
    with pytest.raises(WeightsError, match="only tp=1 is supported"):
        read(only("tp", 1, why="which splits matrices"), tp=2)


def test_values_make_a_nested_table_without_what_is_the_default():
    table = nested({"norm": {"kind": "rms_norm"}}, {"norm.eps": 0.1, "d_model": 8, "_types": [], "head": None})
    assert table == {"norm": {"kind": "rms_norm", "eps": 0.1}, "d_model": 8, "head": "none"}
    attention = {"n_heads": 4, "n_kv_heads": 4, "d_head": 2, "bias": False}
    assert simplified({"d_model": 8, "attention": attention})["attention"] == {"n_heads": 4, "bias": False}


def test_a_family_reads_what_it_writes():
    config = GEMMA2.read(Source({**KEYS, "attn_logit_softcapping": None, "head_dim": 6}, None))
    assert config.placement == "sandwich"
    assert config.attention.softcap is None
    assert config.embedding.scale == 4.0
    data = GEMMA2.write(config)
    assert data["attn_logit_softcapping"] is None
    assert GEMMA2.read(Source(data, None)) == config


def test_a_key_is_one_of_four_types():
    assert Key("x", "y", "text", "a").type == "text"


@pytest.mark.parametrize("data", [{}, {"hidden_size": None}])
def test_a_key_without_a_default_that_is_absent_or_null_is_named(data):
    with pytest.raises(WeightsError, match="lacks 'hidden_size', which has no default: add it"):
        integer("hidden_size", "d_model").read(Source(data, None), {})


@pytest.mark.parametrize("layers", [10_001, 10**9])
def test_more_layers_than_any_model_has_are_refused_before_a_list_of_them_is_made(layers):
    with pytest.raises(WeightsError, match=f"config.json has {layers} layers, more than 10,000"):
        GEMMA2.read(Source({**KEYS, "num_hidden_layers": layers}, None))
