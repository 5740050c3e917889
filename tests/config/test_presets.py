"""Presets: counts equal to the published models', changes reach the right field, unknown names are helped."""

import re

import pytest

from glassformer.config import ConfigError, Dense, Gated, LayerNorm, MoE, Rotary, from_dict, presets, to_dict
from glassformer.sizing import active, count

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", presets.ALL)
def test_preset_survives_the_round_trip_to_a_dict(name):
    config = presets.get(name)
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize("name", presets.ALL)
def test_the_count_in_a_docstring_is_the_count(name):
    doc = presets.ALL[name].__doc__ or ""
    stated = re.search(r"([\d,]+) parameters", doc)
    assert stated, doc
    assert int(stated[1].replace(",", "")) == count(presets.get(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_equals_the_published_integer(name):
    assert count(presets.get(name)) == PUBLISHED[name]


# max_len, norm eps, rotary base, eos, activation, as in the config.json of each release: what no count can see.
DETAILS = {
    "gpt2_xl": (1024, 1e-5, None, (50256,), "gelu_tanh"),
    "bert_large": (512, 1e-12, None, (), "gelu"),
    "roberta_base": (512, 1e-5, None, (2,), "gelu"),
    "distilbert_base": (512, 1e-12, None, (), "gelu"),
    "t5_base": (None, 1e-6, None, (1,), "relu"),
    "t5_v1_1_small": (None, 1e-6, None, (1,), "gelu_tanh"),
    "transformer_big": (None, 1e-5, None, (), "relu"),
    "llama2_7b": (4096, 1e-5, 10_000.0, (2,), "silu"),
    "llama2_70b": (4096, 1e-5, 10_000.0, (2,), "silu"),
    "llama3_8b": (8192, 1e-5, 500_000.0, (128001,), "silu"),
    "mistral_7b": (32768, 1e-5, 10_000.0, (2,), "silu"),
    "mixtral_8x7b": (32768, 1e-5, 1e6, (2,), "silu"),
    "qwen2_0_5b": (131072, 1e-6, 1e6, (151643,), "silu"),
    "qwen3_0_6b": (40960, 1e-6, 1e6, (151645,), "silu"),
    "gptj_6b": (2048, 1e-5, 10_000.0, (50256,), "gelu_tanh"),
    "bloom_560m": (2048, 1e-5, None, (2,), "gelu_tanh"),
}


@pytest.mark.parametrize("name", DETAILS)
def test_what_no_count_can_see_is_as_published(name):
    config = presets.get(name)
    ff = config.feedforward.expert if isinstance(config.feedforward, MoE) else config.feedforward
    base = config.position.base if isinstance(config.position, Rotary) else None
    assert (config.max_len, config.norm.eps, base, config.special.eos, ff.activation) == DETAILS[name]


def test_scales_and_windows_are_as_published():
    assert presets.mistral_7b().attention.window == 4096
    assert (presets.t5_base().attention.scale, presets.t5_base().head.scale) == (1.0, 768**-0.5)
    assert presets.transformer_big().embedding.scale == 32.0
    assert (presets.transformer_base().dropout, presets.transformer_big().dropout) == (0.1, 0.3)
    assert (presets.bert_base().placement, presets.gptj_6b().placement) == ("post", "parallel")


def test_mixtral_activates_two_experts_of_eight():
    assert active(presets.mixtral_8x7b()) == 12_879_925_248


def test_small_presets_are_the_size_they_claim():
    assert 100_000 < count(presets.llama_tiny()) < 1_000_000
    assert isinstance(presets.moe_tiny().feedforward, MoE)
    nano = presets.nano()
    assert (nano.n_layers, nano.n_heads, nano.d_model, nano.max_len, nano.vocab_size) == (4, 4, 128, 64, 65)
    # nanoGPT prints its count without the position table: 0.80M and 10.65M.
    assert count(nano) - 64 * 128 == 795_904
    assert round((count(presets.shakespeare()) - 256 * 384) / 1e6, 2) == 10.65


def test_changes_reach_the_parts():
    config = presets.gpt2(n_layers=2, n_heads=4, d_ff=100, attention__bias=False)
    assert (config.n_layers, config.n_heads, config.d_ff, config.attention.bias) == (2, 4, 100, False)
    assert config.vocab_size == 50257


def test_changes_override_what_one_preset_builds_on_another():
    config = presets.roberta_base(n_layers=3, norm=LayerNorm(eps=1e-3), n_segments=4)
    assert (config.n_layers, config.norm.eps, config.embedding.n_segments) == (3, 1e-3, 4)


def test_a_smaller_vocabulary_drops_the_ids_outside_it():
    assert presets.gpt2(vocab_size=97).special.eos == ()
    assert presets.gpt2(vocab_size=50257).special.eos == (50256,)
    assert presets.t5_small(vocab_size=97).special == presets.t5_small().special


def test_scales_that_depend_on_the_width_follow_it():
    assert presets.transformer_base(d_model=64).embedding.scale == 8.0
    assert presets.t5_small(d_model=64).head.scale == 0.125
    assert presets.t5_v1_1_small(d_model=64).head.scale == 1.0
    assert presets.transformer_base(d_model=64, embedding__scale=3.0).embedding.scale == 3.0


@pytest.mark.parametrize("name", presets.ALL)
def test_the_feed_forward_keeps_its_ratio_to_a_new_width(name):
    published = presets.get(name)
    wider = presets.get(name, d_model=2 * published.d_model)
    assert wider.d_ff == 2 * published.d_ff
    assert type(wider.feedforward) is type(published.feedforward)
    assert presets.get(name, d_model=published.d_model) == published


def test_a_feed_forward_that_is_given_is_left_as_given():
    assert presets.gpt2(d_model=96, n_heads=6).d_ff == 384
    assert presets.gpt2(d_model=96, n_heads=6, d_ff=100).d_ff == 100
    assert presets.gpt2(d_model=96, n_heads=6, feedforward__d_ff=100).d_ff == 100
    assert presets.gpt2(d_model=96, n_heads=6, feedforward=Dense(100)).d_ff == 100
    assert presets.moe_tiny(d_model=128, expert=Gated(100)).d_ff == 100
    assert presets.llama2_7b(d_model=128, n_heads=4).d_ff == 344, "2.6875 times as wide"
    assert presets.qwen2_0_5b(d_model=112, n_heads=14).d_ff == 608
    assert presets.llama_tiny(d_model=40).d_ff == 107, "the nearest to 106.67"


@pytest.mark.parametrize("name", presets.ALL)
def test_heads_that_do_not_divide_the_width_are_refused_and_never_built(name):
    published = presets.get(name)
    odd = published.n_heads * 8 + 2
    if published.attention.d_head is not None:  # heads as wide as published: any width of the model goes
        assert presets.get(name, d_model=odd).d_head == published.d_head
        return
    with pytest.raises(ConfigError, match=rf"d_model={odd} is not a multiple of n_heads={published.n_heads}, .* Use"):
        presets.get(name, d_model=odd)


@pytest.mark.parametrize("width", [0, -4, "96", None, 96.0])
@pytest.mark.parametrize("name", ["gpt2", "t5_small", "transformer_base", "moe_tiny"])
def test_a_width_that_is_no_width_is_refused_by_the_config(name, width):
    with pytest.raises(ConfigError, match=r"d_model=.* must be a whole number of at least 1"):
        presets.get(name, d_model=width)


def test_an_unknown_field_is_refused():
    with pytest.raises(ConfigError, match="n_layers"):
        presets.gpt2(n_layer=2)


def test_get_forgives_spelling_and_names_the_nearest():
    assert presets.get("GPT2-medium") == presets.gpt2_medium()
    assert presets.get("qwen2-0.5b") == presets.qwen2_0_5b()
    with pytest.raises(ConfigError, match=r"'gpt3' is not a preset\. Did you mean .*gpt2"):
        presets.get("gpt3")
    with pytest.raises(ConfigError, match=r"Use one of bart_base, .*gpt2, "):
        presets.get("zzzzzz")
