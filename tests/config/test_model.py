"""What a config refuses, and the values it derives."""

import dataclasses

import pytest

from glassformer import config as c
from tests import variants


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 0}, "vocab_size=0 must be a whole number of at least 1"),
        ({"n_layers": -1}, "n_layers=-1"),
        ({"max_len": 0}, "max_len=0"),
        ({"max_len": None}, "learned positions need max_len"),
        ({"dropout": 1.0}, "dropout=1.0 must be in"),
        ({"init_std": 0.0}, "init_std=0.0 must be positive"),
        ({"placement": "middle"}, "placement='middle' is not known"),
        ({"d_head": None}, "d_model=14 is not a multiple of n_heads=6"),
        ({"position": c.Sinusoidal(), "d_model": 15}, "d_model=15 must be even"),
        ({"position": c.QueryKeyPosition(), "d_model": 15}, "d_model=15 must be even"),
        ({"position": c.QueryKeyPosition(c.Learned()), "max_len": None}, "learned positions need max_len"),
        ({"feedforward": c.NoFeedForward(), "placement": "parallel"}, "this model has none: use 'pre'"),
        ({"position": c.Rotary(fraction=0.3)}, "gives 1, which must be even"),
        ({"position": c.Rotary(fraction=0.5, scaling=c.NTKScaling(factor=2.0))}, "NTK scaling"),
        ({"attention": c.Attention(n_heads=7, window=2, window_layers=(2,))}, "window_layers names layer 2"),
        ({"embedding": c.Embedding(width=10)}, "set head.width=10, or head.tied=False"),
        ({"head": c.Head(width=10)}, "uses the token table of width 14, but its input has width 10"),
        (
            {"embedding": c.Embedding(width=9), "head": c.Head(tied=False), "position": c.Sinusoidal()},
            "embedding.width=9 must be even",
        ),
        (
            {"embedding": c.Embedding(width=10), "head": c.Head(width=10), "position": c.QueryKeyPosition()},
            "query/key positions do not support embedding.width",
        ),
        ({"position": c.T5Bias(), "score_bias": c.T5Bias()}, "position is a T5 bias itself"),
        ({"first_norm": False, "placement": "post"}, "placement='post' has none there: use 'pre'"),
        ({"first_norm": False, "shared_blocks": (0, 0)}, "shared_blocks shares its block"),
        (
            {"shared_blocks": (0, 0), "layer_kinds": (c.LayerKind((0,), feedforward=c.Gated(3)),)},
            "layer_kinds gives some layers another one",
        ),
        ({"shared_blocks": (0,)}, "shared_blocks has 1 entries, but n_layers=2"),
        ({"shared_blocks": (1, 0)}, "must number the blocks 0, 1, 2, ..."),
        ({"special": c.Special(eos=(31,))}, "special.eos=31 is outside the vocabulary of 31"),
    ],
)
def test_impossible_models_are_refused(changes, words):
    with pytest.raises(c.ConfigError) as caught:
        c.replace(variants.decoder(), **changes)
    assert words in str(caught.value)


def test_the_common_base_cannot_be_made():
    fields = {f.name: getattr(variants.decoder(), f.name) for f in dataclasses.fields(c.ModelConfig)}
    with pytest.raises(c.ConfigError, match="make one of those"):
        c.ModelConfig(**fields)


def test_parallel_has_no_place_for_cross_attention():
    with pytest.raises(c.ConfigError, match="does not support cross-attention"):
        variants.seq2seq(placement="parallel")
    with pytest.raises(c.ConfigError, match="window_layers is ambiguous"):
        variants.seq2seq(attention=c.Attention(n_heads=7, window=2, window_layers=(0,)))
    with pytest.raises(c.ConfigError, match="shared_blocks is ambiguous"):
        variants.seq2seq(shared_blocks=(0, 0))


def test_derived_values():
    config = variants.decoder(attention=c.Attention(n_heads=7))
    assert (config.n_kv_heads, config.d_head, config.d_value, config.scale) == (7, 2, 2, 1 / 2**0.5)
    assert config.out_bias is True
    grouped = variants.decoder(
        attention=c.Attention(n_heads=6, n_kv_heads=3, d_head=4, d_value=5, scale=1.0, bias=False)
    )
    assert (grouped.n_kv_heads, grouped.d_head, grouped.d_value, grouped.scale) == (3, 4, 5, 1.0)
    assert grouped.out_bias is False
    assert variants.decoder(feedforward=c.MoE(n_experts=3, n_active=1, expert=c.Gated(d_ff=17))).d_ff == 17
    assert variants.decoder(feedforward=c.NoFeedForward()).d_ff == 0


def test_a_learned_table_is_found_wherever_it_is_used():
    table = c.Learned(offset=3)
    assert variants.decoder(position=table).learned_positions == table
    assert variants.decoder(position=c.QueryKeyPosition(table)).learned_positions == table
    for position in (c.QueryKeyPosition(), c.Sinusoidal(), c.NoPosition(), c.T5Bias()):
        assert variants.decoder(position=position).learned_positions is None


def test_windows_per_layer():
    config = variants.decoder(n_layers=3, attention=c.Attention(n_heads=7, window=2, window_layers=(0, 2)))
    assert [config.window(i) for i in range(3)] == [2, None, 2]
    assert [variants.decoder(window=4).window(i) for i in range(2)] == [4, 4]
