"""A config's facts are found under whatever name they have, and nothing is guessed."""

from types import SimpleNamespace

import pytest
from torch import nn

import glassformer as gf
from glassformer.doctor.subject.declared import declared, known_scales


def facts(**fields):
    return declared(SimpleNamespace(config=SimpleNamespace(**fields)))


def test_spellings_of_one_fact_are_one_fact():
    assert facts(n_embd=48).d_model == facts(hidden_size=48).d_model == facts(d_model=48).d_model == 48
    assert facts(block_size=64).max_len == facts(max_position_embeddings=64).max_len == 64
    assert declared(SimpleNamespace(cfg={"vocab_size": 7})).vocab_size == 7


@pytest.mark.parametrize(
    ("fact", "field", "value", "expected"),
    [
        ("tied", "share_decoder_input_output_embed", True, True),
        ("tied", "tie_lm_head_weights", False, False),
        ("tied", "share_layer_weights", True, None),
        ("activation", "activation_fn", "relu", "relu"),
        ("activation", "ffn_act_type", "gelu", "gelu"),
        ("eps", "norm_layer_epsilon", 1e-3, 1e-3),
        ("eps", "adam_eps", 1e-3, None),
        ("placement", "post_layernorm", True, "post"),
        ("placement", "decoder_normalize_before", True, "pre"),
        ("placement", "normalize_after", True, "post"),
        ("placement", "norm", "pre", "pre"),
        ("placement", "norm_type", "post-LN", "post"),
        ("placement", "norm", "rmsnorm", None),
        ("rope_base", "rope_freq_base", 500.0, 500.0),
        ("max_len", "max_target_positions", 64, 64),
        ("n_layers", "n_decoder_layers", 3, 3),
        ("window", "sliding_attention_size", 8, 8),
    ],
)
def test_other_spellings_are_read_by_their_words(fact, field, value, expected):
    assert getattr(facts(**{field: value}), fact) == expected


def test_special_ids_and_sizes_are_read_from_the_model_itself():
    model = nn.Module()
    model.pad_id, model.n_heads, model.eos_token_id = 3, 4, 9
    model.table = nn.Embedding(31, 8, padding_idx=5)
    assert (declared(model).pad, declared(model).n_heads, declared(model).raw["eos_token_id"]) == (3, 4, 9)
    model.config = {"n_heads": 2}
    assert (declared(model).pad, declared(model).n_heads) == (3, 2)
    del model.pad_id
    assert declared(model).pad == 5
    model.config = {"pad_token_id": 1}
    assert declared(model).pad == 1


def test_what_is_not_declared_is_none():
    empty = declared(object())
    assert empty.vocab_size is None
    assert empty.attention_scale(16) is None
    assert empty.position_kind is None
    assert empty.window_of(0) is None


def test_what_the_user_expects_goes_before_the_config():
    both = declared(SimpleNamespace(config={"sliding_window": 4}), {"sliding-window": 128})
    assert both.window_of(0) == 128


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"position": "rope"}, "rotary"),
        ({"position": "learned"}, "learned"),
        ({"position": "none"}, "none"),
        ({"alibi": True}, "alibi"),
        ({"rope_theta": 1e4}, "rotary"),
        ({"relative_attention_num_buckets": 32}, "t5"),
        ({"position_embedding_type": "absolute", "rope_theta": 1e4}, "learned"),
    ],
)
def test_position_schemes_are_recognised(fields, kind):
    assert facts(**fields).position_kind == kind


def test_scales_that_are_not_one_over_root_d():
    assert facts(query_pre_attn_scalar=64).attention_scale(16)[0] == 1 / 8
    assert facts(model_type="gpt_neo").attention_scale(16)[0] == 1.0
    assert facts(attention_scale=0.3).attention_scale(16)[0] == 0.3
    assert facts(scale_attn_by_inverse_layer_idx=True).attention_scale(16, 3)[0] == 1 / 16
    assert facts(relative_attention=True, pos_att_type=["c2p", "p2c"]).attention_scale(12)[0] == 1 / 6
    assert known_scales(16, 64, 4)["1/√d_model"] == 1 / 8


def test_windows_differ_by_layer_where_the_config_says_so():
    mixed = facts(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    assert [mixed.window_of(i) for i in range(2)] == [8, None]
    assert facts(sliding_window=8, use_sliding_window=False).window_of(0) is None


def test_our_own_config_is_read_through_its_parts():
    ours = declared(gf.build(gf.presets.gpt2(vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_len=16)))
    assert (ours.head_width, ours.position_kind, ours.activation, ours.tied) == (8, "learned", "gelu_tanh", True)
    with pytest.raises(AttributeError):
        ours.nonsense  # noqa: B018


def test_an_encoders_own_text_config_is_read():
    text = {"sliding_window": 6, "hidden_size": 8, "id2label": {0: "a"}}
    nested = facts(encoder={"text_config": text, "vision_config": {"sliding_window": 3}}, decoder={"sliding_window": 4})
    assert nested.of_stack("encoder").window_of(0) == 6
    assert nested.of_stack("decoder").window_of(0) == 4


def test_a_class_is_a_config_and_so_is_an_instance_that_sets_nothing():
    class Base:
        rotary_dim = 8

        def method(self):
            return 1

    class Config(Base):
        n_layer, n_head = 3, 4

    for config in (Config, Config()):
        message = declared(SimpleNamespace(config=config))
        assert (message.position_kind, message.whole("n_layers"), message.whole("n_heads")) == ("rotary", 3, 4)
        assert "method" not in message.raw


@pytest.mark.parametrize("name", ["global_block_size", "max_batch_size", "max_vocab_size", "max_new_tokens"])
def test_other_sizes_are_no_length(name):
    assert facts(**{name: 16}).max_len is None


def test_a_window_may_be_an_attribute_of_a_model_without_a_config():
    model = nn.Linear(2, 2)
    model.window_size = 16
    assert declared(model).window_of(0) == 16
    model.config = SimpleNamespace(vocab_size=7)
    assert declared(model).window_of(0) is None
