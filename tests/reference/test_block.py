"""Each placement of norms, written out for one block by the formulas of its docstring."""

from typing import Any

import numpy as np
import pytest

from glassformer import config as gf
from glassformer.reference import random_params
from glassformer.reference.arrays import Array, select_prefix
from glassformer.reference.attention import attention
from glassformer.reference.block import ForwardContext, block
from glassformer.reference.feedforward import feedforward
from glassformer.reference.ops import normalize

B, T, D = 2, 5, 8
FORMULAS: dict[str, Any] = {
    "pre": lambda x, a, f, n, r: (lambda y: y + r * f(n("norm_feedforward", y)))(x + r * a(n("norm_attention", x))),
    "post": lambda x, a, f, n, r: (lambda y: n("norm_feedforward", y + r * f(y)))(n("norm_attention", x + r * a(x))),
    "after": lambda x, a, f, n, r: (lambda y: y + r * n("norm_feedforward", f(y)))(x + r * n("norm_attention", a(x))),
    "sandwich": lambda x, a, f, n, r: (lambda y: y + r * n("norm_feedforward_out", f(n("norm_feedforward", y))))(
        x + r * n("norm_attention_out", a(n("norm_attention", x)))
    ),
    "parallel": lambda x, a, f, n, r: x + r * a(n("norm", x)) + r * f(n("norm", x)),
    "parallel_two": lambda x, a, f, n, r: x + r * a(n("norm_attention", x)) + r * f(n("norm_feedforward", x)),
}


@pytest.mark.parametrize("placement", FORMULAS)
def test_a_block_is_its_formula(placement: Any) -> None:
    config = gf.DecoderConfig(
        vocab_size=7,
        d_model=D,
        n_layers=1,
        attention=gf.Attention(2),
        feedforward=gf.Dense(5),
        norm=gf.RMSNorm(offset=0.5),
        position=gf.NoPosition(),
        placement=placement,
        residual_scale=0.7,
    )
    weights = select_prefix(random_params(config), "decoder.blocks.0")
    x = np.random.default_rng(1).standard_normal((B, T, D))
    allowed = np.broadcast_to(np.tri(T, dtype=bool), (B, T, T))

    def attend(n: Array) -> Array:
        return attention(config, select_prefix(weights, "attention"), n, n, allowed)[0]

    def feed(n: Array) -> Array:
        assert isinstance(config.feedforward, gf.Dense)
        return feedforward(config.feedforward, select_prefix(weights, "feedforward"), n)[0]

    def norm(name: str, y: Array) -> Array:
        return normalize(config.norm, weights, name, y)

    expected = FORMULAS[placement](x, attend, feed, norm, 0.7)
    y, saved = block(config, weights, x, ForwardContext(allowed, None, None, None, None, None))
    np.testing.assert_allclose(y, expected, rtol=1e-13, atol=1e-13)
    assert saved["resid_post"] is y
