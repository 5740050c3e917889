"""Which parts the fused kernels compute: an allow-list of config fields."""

import pytest

from glassformer import config as c
from glassformer.kernels.cuda.graph import parts
from glassformer.model import build
from tests.kernels.test_decode_support import BASE, CHANGES


@pytest.fixture(autouse=True)
def _forget_answers():
    """Answers are kept, and these tests change the rules."""
    parts.unsupported_parts.cache_clear()
    yield
    parts.unsupported_parts.cache_clear()


def refused(config: c.ModelConfig) -> set[str]:
    return set(parts.unsupported_parts(config, 0))


def test_the_refused_fields_are_these(monkeypatch):
    """Every field of the config is changed. What is not listed here is computed, as test_fused.py shows."""
    monkeypatch.setattr(parts, "CHUNK", 1)
    found = {}
    for name, (start, changed) in CHANGES.items():
        more = set().union(*(refused(config) - refused(start) for config in changed))
        if more:
            found[name] = sorted(more)
    assert found == REFUSED


REFUSED = {
    "score_bias": ["attention"],
    "attention.latent": ["attention"],
    "position": ["attention"],
    "position=alibi.rounded": ["attention"],
    "embedding.n_segments": ["embedding"],
    "embedding.norm": ["embedding"],
    "embedding.width": ["embedding"],
    "head": ["head"],
    "head.transform": ["head"],
    "head.width": ["head"],
}
"""Changed fields, and the parts that the engine computes then."""


def test_a_new_field_is_refused_until_it_is_listed(monkeypatch):
    config = c.replace(BASE, attention__scale=0.9, residual_scale=0.5)
    monkeypatch.setattr(parts, "CHUNK", 1)
    assert "model" not in refused(config)
    allowed = {name: rule for name, rule in parts.ALLOWED.items() if name not in ("attention.scale", "residual_scale")}
    monkeypatch.setattr(parts, "ALLOWED", allowed)
    parts.unsupported_parts.cache_clear()
    found = parts.unsupported_parts(config, 0)
    assert "attention.scale=0.9" in found["attention"]
    assert "residual_scale=0.5" in found["model"]


def test_layers_are_judged_one_by_one():
    kinds = (c.LayerKind((1,), feedforward=c.Dense(64, activation="relu")),)
    config = c.replace(BASE, d_model=64, feedforward=c.Dense(64), layer_kinds=kinds)
    parts_of = [parts.unsupported_parts(config, layer) for layer in range(2)]
    assert parts_of[0].get("feedforward") is None
    assert parts_of[1].get("feedforward") is None


def test_a_module_that_is_not_plain_is_the_engines():
    config = c.replace(BASE, d_model=64, attention=c.Attention(4), feedforward=c.Dense(64))
    model = build(config)
    block, dtype = model.blocks[0], model.embed.tokens.weight.dtype
    assert parts.attention_is_fused(config, block, 0, dtype)
    assert parts.feedforward_is_fused(config, block, 0, dtype)

    class Adapted(type(block.attention.q)):
        pass

    block.attention.q.__class__ = Adapted
    block.feedforward.down.__class__ = Adapted
    assert not parts.attention_is_fused(config, block, 0, dtype)
    assert not parts.feedforward_is_fused(config, block, 0, dtype)


@pytest.mark.parametrize("spec", [c.Dense(8, activation="quick_gelu"), c.Gated(8, activation="relu")])
def test_activations_have_their_numbers(spec):
    assert parts.ACTIVATION_NAMES[parts.activation_number(spec)] == spec.activation
