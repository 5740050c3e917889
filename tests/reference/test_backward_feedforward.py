"""The gradient of the feed-forward alone, against finite differences along random directions."""

import numpy as np
import pytest

from glassformer import config as gf
from glassformer.reference import random_params
from glassformer.reference.arrays import select_prefix
from glassformer.reference.backward_feedforward import feedforward_backward
from glassformer.reference.feedforward import feedforward

STEP, ABSOLUTE, RELATIVE = 1e-5, 1e-9, 1e-6  # as reasoned in test_backward.py

PARTS: dict[str, gf.FeedForward] = {
    **{f"dense-{name}": gf.Dense(7, name) for name in ("relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh")},
    **{f"gated-{name}": gf.Gated(7, name, bias=True) for name in ("relu", "gelu", "silu")},
    "moe": gf.MoE(5, 2, gf.Gated(3)),
    "moe-all": gf.MoE(3, 3, gf.Dense(3)),
    "moe-raw": gf.MoE(5, 2, gf.Dense(3), normalize=False),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())
def test_gradients_equal_finite_differences(part: gf.FeedForward) -> None:
    config = gf.DecoderConfig(
        vocab_size=5,
        d_model=6,
        n_layers=1,
        attention=gf.Attention(1),
        feedforward=part,
        position=gf.NoPosition(),
    )
    generator = np.random.default_rng(0)
    weights = select_prefix(random_params(config), "decoder.blocks.0.feedforward")
    values = weights | {"x": generator.standard_normal((2, 3, 6))}
    d_out = generator.standard_normal((2, 3, 6))

    def run(changed: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        given = values | changed
        return feedforward(part, {name: given[name] for name in weights}, given["x"])

    d_x, gradients = feedforward_backward(part, weights, run({})[1], d_out)
    gradients = gradients | {"x": d_x}
    assert set(gradients) == set(values)
    for name, value in values.items():
        direction = generator.standard_normal(value.shape)
        direction /= np.linalg.norm(direction)
        up, down = (run({name: value + sign * STEP * direction})[0] for sign in (1, -1))
        measured = float(((up - down) * d_out).sum() / (2 * STEP))
        derived = float((gradients[name] * direction).sum())
        assert abs(measured - derived) <= ABSOLUTE + RELATIVE * abs(measured), name


def test_an_expert_that_no_token_chose_gets_no_gradient_but_its_router_row_does() -> None:
    part = gf.MoE(3, 1, gf.Dense(3), normalize=False)
    config = gf.DecoderConfig(
        vocab_size=5, d_model=6, n_layers=1, attention=gf.Attention(1), feedforward=part, position=gf.NoPosition()
    )
    weights = select_prefix(random_params(config), "decoder.blocks.0.feedforward")
    x = np.random.default_rng(0).standard_normal((1, 1, 6))
    saved = feedforward(part, weights, x)[1]
    _, gradients = feedforward_backward(part, weights, saved, np.ones((1, 1, 6)))
    for e in range(3):
        used = saved["gates"][0, 0, e] > 0
        assert np.any(gradients[f"experts.{e}.up.weight"]) == used
        assert np.any(gradients["router.weight"][e])
