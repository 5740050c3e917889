"""Names and shapes: a few written out from docs/shapes.md, and the parameter counts of published models."""

import math

import numpy as np
import pytest

from glassformer import config as gf
from glassformer.reference import random_params, shapes
from glassformer.reference.params import as_params


def count(config: gf.ModelConfig) -> int:
    return sum(math.prod(shape) for shape in shapes(config).values())


def test_gpt2_small_has_124_439_808_parameters() -> None:
    config = gf.DecoderConfig(
        vocab_size=50257,
        d_model=768,
        n_layers=12,
        attention=gf.Attention(12),
        feedforward=gf.Dense(3072),
        max_len=1024,
    )
    assert count(config) == 124_439_808


def test_bert_base_with_pooler_has_109_482_240_parameters() -> None:
    config = gf.EncoderConfig(
        vocab_size=30522,
        d_model=768,
        n_layers=12,
        attention=gf.Attention(12),
        feedforward=gf.Dense(3072, "gelu"),
        placement="post",
        max_len=512,
        embedding=gf.Embedding(n_segments=2, norm=True),
        head=None,
        pooler=True,
    )
    assert count(config) == 109_482_240


def test_t5_small_has_60_506_624_parameters() -> None:
    config = gf.Seq2SeqConfig(
        vocab_size=32128,
        d_model=512,
        n_layers=6,
        n_encoder_layers=6,
        attention=gf.Attention(8, bias=False),
        feedforward=gf.Dense(2048, "relu", bias=False),
        norm=gf.RMSNorm(),
        position=gf.T5Bias(),
    )
    assert count(config) == 60_506_624


def test_shapes_use_every_width_where_it_belongs() -> None:
    config = gf.DecoderConfig(
        vocab_size=23,
        d_model=10,
        n_layers=1,
        attention=gf.Attention(6, n_kv_heads=2, d_head=4, d_value=3, out_bias=False, qk_norm=gf.LayerNorm()),
        feedforward=gf.MoE(5, 2, gf.Gated(7)),
        position=gf.Learned(offset=2),
        placement="parallel",
        max_len=17,
        norm=gf.RMSNorm(),
        head=gf.Head(tied=False, bias=True, transform="gelu"),
    )
    table = shapes(config)
    assert table["decoder.position.weight"] == (19, 10)
    assert table["decoder.blocks.0.attention.q.weight"] == (24, 10)
    assert table["decoder.blocks.0.attention.k.bias"] == (8,)
    assert table["decoder.blocks.0.attention.v.weight"] == (6, 10)
    assert table["decoder.blocks.0.attention.o.weight"] == (10, 18)
    assert "decoder.blocks.0.attention.o.bias" not in table
    assert table["decoder.blocks.0.attention.q_norm.bias"] == (4,)
    assert table["decoder.blocks.0.feedforward.router.weight"] == (5, 10)
    assert table["decoder.blocks.0.feedforward.experts.4.gate.weight"] == (7, 10)
    assert table["decoder.blocks.0.norm.weight"] == (10,)
    assert "decoder.blocks.0.norm.bias" not in table
    assert "decoder.blocks.0.norm_attention.weight" not in table
    assert table["head.transform.bias"] == (10,)
    assert table["head.weight"] == (23, 10)


def test_post_norm_has_no_final_norm() -> None:
    config = gf.DecoderConfig(
        vocab_size=5,
        d_model=4,
        n_layers=1,
        attention=gf.Attention(2),
        feedforward=gf.Dense(3),
        position=gf.NoPosition(),
        placement="post",
    )
    assert "decoder.norm.weight" not in shapes(config)
    assert "decoder.norm.weight" in shapes(gf.replace(config, placement="pre"))


def small() -> gf.DecoderConfig:
    return gf.DecoderConfig(
        vocab_size=5,
        d_model=4,
        n_layers=1,
        attention=gf.Attention(2),
        feedforward=gf.Dense(3),
        position=gf.NoPosition(),
    )


def test_random_params_are_repeatable_and_hide_nothing() -> None:
    first, again, other = (random_params(small(), seed) for seed in (0, 0, 1))
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        assert (value != other[name]).all()
        assert not np.isin(value, (0, 1)).any()
    assert first["decoder.norm.weight"].mean() > 0.5


def test_params_that_do_not_fit_are_refused_by_name() -> None:
    params = random_params(small())
    with pytest.raises(ValueError, match=r"missing \['decoder.norm.bias'\]"):
        as_params(small(), {k: v for k, v in params.items() if k != "decoder.norm.bias"})
    with pytest.raises(ValueError, match=r"unknown \['extra'\]"):
        as_params(small(), params | {"extra": np.ones(1)})
    with pytest.raises(ValueError, match=r"requires \(4,\)"):
        as_params(small(), params | {"decoder.norm.bias": np.ones(5)})


def test_params_of_any_type_become_float64() -> None:
    params = {name: value.astype(np.float32) for name, value in random_params(small()).items()}
    assert {value.dtype for value in as_params(small(), params).values()} == {np.dtype(np.float64)}
