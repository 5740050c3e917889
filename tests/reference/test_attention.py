"""Attention by hand, against torch's, and the sharing of key/value heads."""

import math

import numpy as np
import pytest
import torch

from glassformer import config as gf
from glassformer.reference import random_params
from glassformer.reference.arrays import select_prefix
from glassformer.reference.attention import attention, join_heads, repeat_kv_heads, split_heads


def decoder(attention: gf.Attention, d_model: int = 10) -> gf.DecoderConfig:
    return gf.DecoderConfig(
        vocab_size=5,
        d_model=d_model,
        n_layers=1,
        attention=attention,
        feedforward=gf.Dense(7),
        position=gf.NoPosition(),
    )


def test_two_tokens_by_hand() -> None:
    """All projections the identity, one head of width 1, scale 1: scores are x_i x_j, the answer a mean of the x_j."""
    config = decoder(gf.Attention(1, bias=False), d_model=1)
    weights = {f"{name}.weight": np.eye(1) for name in "qkvo"}
    x = np.array([[[1.0], [2.0]]])
    out, saved = attention(config, weights, x, x, np.tri(2, dtype=bool)[None])
    share = 1 / (1 + math.exp(2 - 4))  # of token 1 in query 1: e^4 against e^2
    np.testing.assert_allclose(saved["pattern"][0, 0], [[1, 0], [1 - share, share]], rtol=1e-14)
    np.testing.assert_allclose(out[0, :, 0], [1, 1 + share], rtol=1e-14)


def test_heads_are_laid_out_one_after_another() -> None:
    x = np.arange(12.0).reshape(1, 2, 6)
    heads = split_heads(x, 3)
    np.testing.assert_array_equal(heads[0, 1], [[2, 3], [8, 9]])
    np.testing.assert_array_equal(join_heads(heads), x)


def test_query_head_h_reads_key_value_head_h_over_the_group() -> None:
    shared = repeat_kv_heads(np.arange(2.0).reshape(1, 2, 1, 1), 6)
    np.testing.assert_array_equal(shared.ravel(), [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("G", [1, 2, 6])
def test_grouped_attention_equals_torch(G: int) -> None:
    config = decoder(gf.Attention(6, n_kv_heads=G, d_head=4, d_value=3, scale=0.7))
    weights = select_prefix(random_params(config), "decoder.blocks.0.attention")
    generator = np.random.default_rng(0)
    x, memory = generator.standard_normal((2, 5, 10)), generator.standard_normal((2, 7, 10))
    allowed = generator.random((2, 5, 7)) < 0.6
    allowed[..., 0] = True
    out, saved = attention(config, weights, x, memory, allowed)
    q, k, v = (torch.tensor(saved[name]) for name in "qkv")
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.tensor(allowed)[:, None], scale=0.7, enable_gqa=True
    )
    np.testing.assert_allclose(saved["heads"], theirs.numpy(), rtol=1e-12, atol=1e-14)
    assert out.shape == (2, 5, 10)
    np.testing.assert_allclose(saved["pattern"].sum(axis=-1), 1, rtol=1e-14)
    assert (saved["pattern"].transpose(0, 2, 3, 1)[~allowed] == 0).all()


def test_grouped_equals_multi_head_with_repeated_keys_and_values() -> None:
    grouped = decoder(gf.Attention(6, n_kv_heads=2, d_head=4))
    many = decoder(gf.Attention(6, d_head=4))
    weights = select_prefix(random_params(grouped), "decoder.blocks.0.attention")
    repeated = dict(weights)
    for name in ("k.weight", "v.weight", "k.bias", "v.bias"):
        heads = weights[name].reshape(2, 4, *weights[name].shape[1:])
        repeated[name] = np.repeat(heads, 3, axis=0).reshape(24, *weights[name].shape[1:])
    x = np.random.default_rng(0).standard_normal((1, 3, 10))
    allowed = np.ones((1, 3, 3), dtype=bool)
    ours, theirs = attention(grouped, weights, x, x, allowed)[0], attention(many, repeated, x, x, allowed)[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-13)


def test_qk_norm_takes_the_size_of_queries_and_keys_away() -> None:
    config = decoder(gf.Attention(2, bias=False, qk_norm=gf.RMSNorm(1e-12)))
    weights = select_prefix(random_params(config), "decoder.blocks.0.attention")
    louder = weights | {"q.weight": 100 * weights["q.weight"], "k.weight": 0.01 * weights["k.weight"]}
    x = np.random.default_rng(0).standard_normal((1, 3, 10))
    allowed = np.ones((1, 3, 3), dtype=bool)
    patterns = [attention(config, w, x, x, allowed)[1]["pattern"] for w in (weights, louder)]
    np.testing.assert_allclose(*patterns, rtol=1e-6)  # up to eps, against keys of squared size 1e-4


def test_a_query_without_keys_raises() -> None:
    config = decoder(gf.Attention(2))
    weights = select_prefix(random_params(config), "decoder.blocks.0.attention")
    x = np.ones((1, 2, 10))
    with pytest.raises(ValueError, match="at least one key"):
        attention(config, weights, x, x, np.zeros((1, 2, 2), dtype=bool))
