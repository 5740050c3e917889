"""The gradient of attention alone, against finite differences along random directions."""

from typing import Any

import numpy as np
import pytest

from glassformer import config as gf
from glassformer.reference import random_params
from glassformer.reference.arrays import Array, select_prefix
from glassformer.reference.attention import attention
from glassformer.reference.backward_attention import (
    attention_backward,
    repeat_kv_heads_backward,
    rotate_backward,
    t5_bias_backward,
)
from glassformer.reference.positions import rotary_cos_sin, rotate, t5_bias, t5_buckets

STEP, ABSOLUTE, RELATIVE = 1e-5, 1e-9, 1e-6  # as reasoned in test_backward.py


def decoder(attention: gf.Attention, position: gf.Position) -> gf.DecoderConfig:
    return gf.DecoderConfig(
        vocab_size=5, d_model=10, n_layers=1, attention=attention, feedforward=gf.Dense(7), position=position
    )


@pytest.mark.parametrize("qk_norm", [None, gf.RMSNorm(), gf.LayerNorm()])
@pytest.mark.parametrize("position", [gf.NoPosition(), gf.Rotary(), gf.Rotary(pairing="interleaved", fraction=0.5)])
def test_gradients_of_x_memory_bias_and_weights(qk_norm: gf.Norm | None, position: gf.Position) -> None:
    config = decoder(gf.Attention(6, n_kv_heads=2, d_head=4, d_value=3, scale=0.7, qk_norm=qk_norm), position)
    weights = select_prefix(random_params(config), "decoder.blocks.0.attention")
    generator = np.random.default_rng(0)
    inputs = {
        "x": generator.standard_normal((2, 5, 10)),
        "memory": generator.standard_normal((2, 5, 10)),
        "bias": generator.standard_normal((2, 6, 5, 5)),
    }
    d_out = generator.standard_normal((2, 5, 10))
    allowed = np.broadcast_to(np.tri(5, dtype=bool), (2, 5, 5))
    cos_sin = rotary_cos_sin(position, 4, np.tile(np.arange(5), (2, 1))) if isinstance(position, gf.Rotary) else None

    def run(changed: dict[str, Array]) -> tuple[Array, Any]:
        given = inputs | weights | changed
        own = {name: given[name] for name in weights}
        return attention(config, own, given["x"], given["memory"], allowed, given["bias"], cos_sin)

    found = attention_backward(config, weights, run({})[1], d_out, cos_sin)
    gradients = found.params | {"x": found.x, "memory": found.memory, "bias": found.scores}
    assert set(gradients) == set(inputs | weights)
    for name, value in (inputs | weights).items():
        direction = generator.standard_normal(value.shape)
        direction /= np.linalg.norm(direction)
        up, down = (run({name: value + sign * STEP * direction})[0] for sign in (1, -1))
        measured = float(((up - down) * d_out).sum() / (2 * STEP))
        derived = float((gradients[name] * direction).sum())
        assert abs(measured - derived) <= ABSOLUTE + RELATIVE * abs(measured), name


def test_query_key_position_embedding_gets_the_gradients_of_queries_and_keys() -> None:
    config = decoder(gf.Attention(6, n_kv_heads=2, d_head=4), gf.QueryKeyPosition())
    weights = select_prefix(random_params(config), "decoder.blocks.0.attention")
    generator = np.random.default_rng(0)
    x, qk_position, d_out, direction = generator.standard_normal((4, 2, 5, 10))
    allowed = np.broadcast_to(np.tri(5, dtype=bool), (2, 5, 5))

    def run(p: Array) -> tuple[Array, Any]:
        return attention(config, weights, x, x, allowed, qk_position=p)

    found = attention_backward(config, weights, run(qk_position)[1], d_out)
    up, down = (run(qk_position + sign * STEP * direction)[0] for sign in (1, -1))
    measured = float(((up - down) * d_out).sum() / (2 * STEP))
    derived = float(((found.x + found.keys) * direction).sum())
    assert abs(measured - derived) <= ABSOLUTE + RELATIVE * abs(measured)
    assert np.array_equal(run(qk_position)[1]["v"], run(0 * qk_position)[1]["v"])


def test_nothing_flows_through_a_masked_score() -> None:
    config = decoder(gf.Attention(2), gf.NoPosition())
    weights = select_prefix(random_params(config), "decoder.blocks.0.attention")
    x = np.random.default_rng(0).standard_normal((1, 4, 10))
    saved = attention(config, weights, x, x, np.tri(4, dtype=bool)[None])[1]
    found = attention_backward(config, weights, saved, np.ones((1, 4, 10)))
    assert (found.scores[..., ~np.tri(4, dtype=bool)] == 0).all()


def test_shared_heads_add_up() -> None:
    d_y = np.arange(6.0).reshape(1, 6, 1, 1)
    np.testing.assert_array_equal(repeat_kv_heads_backward(d_y, 2).ravel(), [0 + 1 + 2, 3 + 4 + 5])


def test_rotation_backward_is_the_transpose() -> None:
    """u . R v = (R^T u) . v for all u and v, also with YaRN's factor on the cos_sin."""
    rotary = gf.Rotary(fraction=0.5, scaling=gf.YarnScaling(4.0, 16))
    cos_sin = rotary_cos_sin(rotary, 8, np.array([[0, 3, 5]]))
    u, v = np.random.default_rng(0).standard_normal((2, 1, 2, 3, 8))
    turned = (u * rotate(rotary, v, *cos_sin)).sum()
    assert (rotate_backward(rotary, u, cos_sin) * v).sum() == pytest.approx(turned, rel=1e-13)


def test_t5_table_gradient_is_the_transpose_of_the_lookup() -> None:
    buckets = t5_buckets(gf.T5Bias(4, 3), np.array([[0, 1, 2, 3, 4]]), bidirectional=False)
    generator = np.random.default_rng(0)
    table, d_scores = generator.standard_normal((4, 3)), generator.standard_normal((1, 3, 5, 5))
    expected = (t5_bias(table, buckets) * d_scores).sum()
    assert (t5_bias_backward((4, 3), buckets, d_scores) * table).sum() == pytest.approx(expected, rel=1e-13)
