"""The embedding against its definition, written out for one token, and its gradient against finite differences."""

import numpy as np
import pytest

from glassformer import config as c
from glassformer.reference import loss, loss_and_gradients, random_params
from glassformer.reference.embedding import embed

AFTER = c.Embedding(scale=2.0, n_segments=2, norm=True, width=6)
BEFORE = c.Embedding(scale=2.0, width=6, project="before_positions", project_bias=False)


def encoder(embedding: c.Embedding, **changes) -> c.EncoderConfig:
    parts = {"vocab_size": 11, "d_model": 8, "n_layers": 1, "attention": c.Attention(2), "feedforward": c.Dense(5)}
    return c.EncoderConfig(**parts, max_len=7, embedding=embedding, head=c.Head(width=6), **changes)


def embed_one(config: c.ModelConfig, params: dict, token: int, position: int) -> np.ndarray:
    ids, positions = np.array([[token]]), np.array([[position]])
    return embed(config, params, "encoder", ids, positions, None)[0][0, 0]


def test_a_factorized_embedding_is_projected_after_its_norm():
    config = encoder(AFTER)
    params = random_params(config)
    x = 2.0 * params["embed.tokens.weight"][3] + params["embed.segments.weight"][0]
    x = x + params["encoder.position.weight"][4]
    x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * params["encoder.embed_norm.weight"]
    x = x + params["encoder.embed_norm.bias"]
    expected = params["encoder.project.weight"] @ x + params["encoder.project.bias"]
    assert embed_one(config, params, 3, 4) == pytest.approx(expected, abs=1e-12)


def test_or_before_the_positions_are_added():
    config = encoder(BEFORE)
    params = random_params(config)
    expected = params["encoder.project.weight"] @ (2.0 * params["embed.tokens.weight"][3])
    expected = expected + params["encoder.position.weight"][4]
    assert params["encoder.position.weight"].shape == (7, 8)
    assert embed_one(config, params, 3, 4) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("embedding", [AFTER, BEFORE], ids=["after", "before"])
@pytest.mark.parametrize("name", ["encoder.project.weight", "embed.tokens.weight", "encoder.position.weight"])
def test_gradients_are_finite_differences(embedding, name):
    config = encoder(embedding)
    params = random_params(config)
    tokens, targets = np.array([[3, 5, 3]]), np.array([[1, -100, 2]])
    gradient = loss_and_gradients(config, params, tokens, targets)[1][name]
    at = (3, 2) if name == "embed.tokens.weight" else (1, 2)
    step = 1e-6
    values = []
    for sign in (1, -1):
        changed = {key: value.copy() for key, value in params.items()}
        changed[name][at] += sign * step
        values.append(loss(config, changed, tokens, targets))
    assert gradient[at] == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-8)
    assert abs(gradient[at]) > 1e-4


def test_a_position_beyond_the_table_is_refused():
    config = encoder(AFTER)
    with pytest.raises(ValueError, match="position 7 is outside the learned position table of max_len=7"):
        embed_one(config, random_params(config), 0, 7)
