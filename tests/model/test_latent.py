"""Multi-head latent attention: the absorbed form, and what the KV cache holds. test_transformer has the oracle."""

import pytest
import torch

from glassformer import config as c
from glassformer.model import build
from tests import variants

CONFIG = variants.decoder(
    attention=c.Attention(n_heads=6, d_head=6, d_value=5, latent=c.Latent(kv_rank=40, d_shared=2, q_rank=7)),
    position=c.Rotary(fraction=1 / 3),
)


def absorbing(model, below):
    for block in model.blocks:
        block.attention.absorbs_below = below
    return model


@pytest.mark.parametrize("changes", [{}, {"softcap": 0.7}, {"sinks": True}, {"window": 3}], ids=str)
@torch.no_grad()
def test_the_absorbed_form_computes_the_same(changes, monkeypatch):
    config = c.replace(CONFIG, **{f"attention__{name}": value for name, value in changes.items()})
    model, _ = variants.lively(config)
    ids = variants.tokens(2, 9)
    used = []
    absorb = type(model.blocks[0].attention).absorb
    monkeypatch.setattr(
        type(model.blocks[0].attention), "absorb", lambda self, *given: (used.append(1), absorb(self, *given))[1]
    )
    expanded = absorbing(model, 0)(ids)
    assert not used
    cache = absorbing(model, 100).new_cache("growing")
    steps = torch.cat([model(ids[:, t : t + 1], cache=cache) for t in range(9)], 1)
    assert used
    assert (steps - expanded).abs().max() <= 1e-12 * expanded.abs().max()


def test_the_cache_holds_one_vector_and_the_shared_components():
    model = build(CONFIG)
    cache = model.new_cache("growing")
    model(variants.tokens(2, 9), cache=cache)
    keys, values = cache.layers[0].extend(torch.empty(2, 1, 0, 2), torch.empty(2, 1, 0, 40))
    assert keys.shape == (2, 1, 9, 2)
    assert values.shape == (2, 1, 9, 40)


def test_few_queries_over_many_keys_are_absorbed():
    """2C + R - K - U more for each query and key of a head, C (K - R + U) less for each key."""
    attention = build(CONFIG).blocks[0].attention
    assert attention.absorbs_below == 40 * (6 - 2 + 5) / (2 * 40 + 2 - 6 - 5)
