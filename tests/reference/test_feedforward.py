"""Dense, gated and mixture: by hand, and the mixture against plain sums of its experts."""

import numpy as np
import pytest

from glassformer import config as gf
from glassformer.reference import random_params
from glassformer.reference.arrays import select_prefix
from glassformer.reference.feedforward import chosen_experts, expert, feedforward, mixture
from glassformer.reference.ops import softmax


def weights_of(part: gf.FeedForward) -> dict[str, np.ndarray]:
    config = gf.DecoderConfig(
        vocab_size=5,
        d_model=4,
        n_layers=1,
        attention=gf.Attention(1),
        feedforward=part,
        position=gf.NoPosition(),
    )
    return select_prefix(random_params(config), "decoder.blocks.0.feedforward")


X = np.random.default_rng(0).standard_normal((2, 3, 4))


def test_dense_and_gated_by_hand() -> None:
    """x = 2: up 2*3 - 1 = 5, gate -2 or 2."""
    weights = {"up.weight": np.array([[3.0]]), "up.bias": np.array([-1.0]), "down.weight": np.array([[10.0]])}
    x = np.array([[[2.0]]])
    assert expert(gf.Dense(1, "relu"), weights, x)[0].item() == 50
    assert expert(gf.Gated(1, "relu"), weights | {"gate.weight": np.array([[-1.0]])}, x)[0].item() == 0
    assert expert(gf.Gated(1, "relu"), weights | {"gate.weight": np.array([[1.0]])}, x)[0].item() == 100


def test_experts_are_the_largest_ties_by_lowest_index() -> None:
    chosen = chosen_experts(np.array([[0.1, 0.4, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]]), 2)
    np.testing.assert_array_equal(chosen, [[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1]])
    probabilities = np.random.default_rng(0).integers(0, 3, 300) / 4  # long enough for an unstable sort to show
    expected = np.flatnonzero(probabilities == 0.5)[:20]
    np.testing.assert_array_equal(np.flatnonzero(chosen_experts(probabilities, 20)), expected)


@pytest.mark.parametrize("inner", [gf.Dense(5, "gelu"), gf.Gated(5)])
@pytest.mark.parametrize("normalize", [True, False])
def test_mixture_with_every_expert_active_is_the_dense_mixture(inner: gf.Dense | gf.Gated, normalize: bool) -> None:
    part = gf.MoE(3, 3, inner, normalize)
    weights = weights_of(part)
    gates = softmax(X @ weights["router.weight"].T)
    expected = sum(
        gates[..., e, None] * expert(inner, select_prefix(weights, f"experts.{e}"), X)[0] for e in range(part.n_experts)
    )
    np.testing.assert_allclose(feedforward(part, weights, X)[0], expected, rtol=1e-13)


def test_mixture_of_one_expert_is_that_expert() -> None:
    part = gf.MoE(1, 1, gf.Gated(5))
    weights = weights_of(part)
    np.testing.assert_allclose(
        mixture(part, weights, X)[0], expert(part.expert, select_prefix(weights, "experts.0"), X)[0], rtol=1e-14
    )


def test_mixture_token_by_token() -> None:
    part = gf.MoE(5, 2, gf.Dense(5))
    weights = weights_of(part)
    out, saved = mixture(part, weights, X)
    for place in np.ndindex(2, 3):
        p = saved["probabilities"][place]
        best = sorted(range(5), key=lambda e, p=p: -p[e])[:2]
        expected = sum(
            p[e] / p[best].sum() * expert(part.expert, select_prefix(weights, f"experts.{e}"), X[place])[0]
            for e in best
        )
        np.testing.assert_allclose(out[place], expected, rtol=1e-13)
    assert ((saved["gates"] > 0).sum(axis=-1) == 2).all()
    np.testing.assert_allclose(saved["gates"].sum(axis=-1), 1, rtol=1e-14)


def test_unnormalised_gates_are_the_probabilities() -> None:
    part = gf.MoE(4, 1, gf.Dense(5), normalize=False)
    saved = mixture(part, weights_of(part), X)[1]
    np.testing.assert_array_equal(saved["gates"].max(axis=-1), saved["probabilities"].max(axis=-1))
