"""Configs survive the trip through dicts and TOML, and say what is wrong with one that cannot."""

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glassformer import config as c
from tests import variants
from tests.sampled import examples

models = variants.decoders | variants.encoders | variants.seq2seqs


@settings(max_examples=examples(150))
@given(config=models)
def test_dict_and_toml_round_trips_are_exact(config):
    assert c.from_dict(c.to_dict(config)) == config
    assert c.from_toml(c.to_toml(c.to_dict(config))) == config


def test_none_that_is_not_the_default_survives():
    config = c.replace(variants.decoder(), head=None, max_len=7)
    assert c.from_toml(c.to_toml(c.to_dict(config))).head is None


def test_special_ids_and_window_layers_survive():
    config = variants.decoder(
        special=c.Special(bos=1, eos=(2, 3), pad=0), attention=c.Attention(n_heads=7, window=3, window_layers=(1,))
    )
    assert c.from_toml(c.to_toml(c.to_dict(config))) == config


plain = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
tables = st.dictionaries(st.from_regex(r"\A[a-z_]{1,6}\Z"), plain, max_size=4)


@settings(max_examples=examples(200))
@given(data=st.dictionaries(st.from_regex(r"\A[a-z_]{1,6}\Z"), plain | tables, max_size=4))
def test_toml_writer_agrees_with_the_standard_reader(data):
    assert tomllib.loads(c.to_toml(data)) == data


def test_a_run_file_is_read_for_its_model_table():
    model = c.to_dict(variants.decoder())
    assert c.from_toml(c.to_toml({"seed": 3, "model": model})) == variants.decoder()


def changed(**changes):
    return {**c.to_dict(variants.decoder()), **changes}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (changed(kind="gpt"), "kind='gpt' is not known. Use one of 'decoder'"),
        (changed(n_layer=3), "model.n_layer is not a field. Did you mean n_layers"),
        (changed(n_layers="three"), "model.n_layers='three' has the wrong type: expected a whole number"),
        (changed(n_layers=2.5), "expected a whole number"),
        (changed(n_layers=-1), "model.n_layers=-1 must be a whole number of at least 1"),
        (changed(attention={"n_heads": 0}), "model.attention.n_heads=0 must be a whole number of at least 1"),
        (changed(n_layers=True), "expected a whole number"),
        (changed(placement="middle"), "placement='middle' has the wrong type: expected one of 'pre'"),
        (changed(position={"kind": "rope"}), "model.position.kind='rope' is not known. Use one of 'none', 'learned'"),
        (changed(position="rotary"), "must be a table of fields"),
        (changed(attention={"n_kv_heads": 2}), "model.attention lacks n_heads"),
        ({"kind": "decoder"}, "model lacks vocab_size, d_model, n_layers, attention and feedforward"),
        ([], "a model config is a table of fields, got list"),
    ],
)
def test_wrong_data_is_refused_naming_the_key(data, words):
    with pytest.raises(c.ConfigError) as caught:
        c.from_dict(data)
    assert words in str(caught.value)


def test_unreadable_toml_is_refused_naming_the_file():
    with pytest.raises(c.ConfigError, match=r"run\.toml is not readable TOML"):
        c.from_toml("a = = 3", source="run.toml")


def test_replace_reaches_into_parts():
    config = c.replace(variants.decoder(), n_layers=5, n_heads=3, n_kv_heads=1, d_ff=17, attention__bias=False)
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.d_ff) == (5, 3, 1, 17)
    assert config.attention.bias is False
    assert config.feedforward.bias is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bias": False}, "Spell it attention__bias, feedforward__bias, head__bias or norm__bias"),
        ({"n_head": 3}, "Did you mean n_heads"),
        ({"attention__colour": 3}, "attention__colour is not one field"),
        ({"head": None, "tied": False}, "tied belongs to head, which is None here"),
    ],
)
def test_replace_refuses_what_it_cannot_place(changes, words):
    with pytest.raises(c.ConfigError, match=words):
        c.replace(variants.decoder(), **changes)


def test_positions_load_under_the_name_they_had_before():
    old = c.to_toml(c.to_dict(variants.decoder(position=c.QueryKeyPosition()))).replace('"query_key"', '"infused"')
    assert 'kind = "infused"' in old
    assert c.from_toml(old).position == c.QueryKeyPosition()
    with pytest.raises(c.ConfigError, match=r"Use one of .*'query_key'\."):
        c.from_toml(old.replace("infused", "fused"))
