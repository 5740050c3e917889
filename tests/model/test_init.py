"""Initial weights: the table covers everything, seeds decide, depth is compensated, the first loss is ln V."""

import math

import pytest
import torch
from hypothesis import given, settings

from glassformer import config as c
from glassformer.config import presets
from glassformer.model import build
from glassformer.model.init import distribution
from glassformer.reference import shapes
from tests import variants
from tests.variants import tokens


@settings(max_examples=60)
@given(config=variants.decoders | variants.encoders | variants.seq2seqs)
def test_names_and_shapes_are_the_documented_ones(config):
    """The oracle states the shapes of docs/shapes.md on its own; the engine must have exactly those."""
    engine = {name: tuple(p.shape) for name, p in build(config, device="meta").named_parameters()}
    assert engine == {name: tuple(shape) for name, shape in shapes(config).items()}
    assert {distribution(name) for name in engine} <= {"one", "zero", "normal", "residual"}


def test_an_unknown_parameter_has_no_silent_default():
    with pytest.raises(KeyError, match="mystery"):
        distribution("mystery")


def test_same_seed_same_weights_whatever_the_dtype():
    a, b, other = (
        build(variants.decoder(), 3),
        build(variants.decoder(), 3, dtype=torch.float64),
        build(variants.decoder(), 4),
    )
    for name, value in a.state_dict().items():
        assert torch.equal(value.double(), b.state_dict()[name])
    assert not torch.equal(a.embed.tokens.weight, other.embed.tokens.weight)


def test_a_built_model_is_in_evaluation_mode():
    model = build(variants.decoder(dropout=0.5))
    assert not model.training
    assert torch.equal(model(tokens(1, 5)), model(tokens(1, 5)))


def test_building_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    build(variants.decoder())
    assert torch.equal(before, torch.get_rng_state())


def test_standard_deviations_are_those_of_the_table():
    model = build(variants.decoder(d_model=120, d_ff=480, n_layers=8, attention=c.Attention(n_heads=6)))
    state = model.state_dict()
    assert float(state["embed.tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert float(state["decoder.blocks.3.attention.q.weight"].std()) == pytest.approx(0.02, rel=0.05)
    for name in ("attention.o", "feedforward.down"):
        assert float(state[f"decoder.blocks.3.{name}.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)
    assert (state["decoder.norm.weight"] == 1).all()
    assert (state["decoder.blocks.0.attention.q.bias"] == 0).all()


def test_an_attention_only_stream_has_half_the_branches():
    shape = {"d_model": 120, "attention": c.Attention(n_heads=6), "feedforward": c.NoFeedForward()}
    alone = build(variants.decoder(**shape, n_layers=4)).state_dict()
    assert float(alone["decoder.blocks.3.attention.o.weight"].std()) == pytest.approx(0.02 / 2, rel=0.05)
    both = build(variants.seq2seq(**shape, n_layers=8, n_encoder_layers=4)).state_dict()
    assert float(both["encoder.blocks.3.attention.o.weight"].std()) == pytest.approx(0.02 / 2, rel=0.05)
    assert float(both["decoder.blocks.3.cross.o.weight"].std()) == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("name", ["nano", "llama_tiny", "moe_tiny"])
def test_first_loss_is_close_to_ln_v(name):
    config = presets.get(name)
    model = build(config)
    ids = tokens(4, 64, vocab=config.vocab_size)
    loss = torch.nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(loss.item() - math.log(config.vocab_size)) < 0.1


def test_meta_device_allocates_nothing():
    model = build(presets.gpt2_xl(), device="meta")
    assert all(p.is_meta for p in model.parameters())


def test_building_for_shapes_is_quick_and_leaves_torchs_own_first_values_out(monkeypatch):
    for name in ("normal_", "uniform_", "kaiming_uniform_"):
        monkeypatch.setattr(
            torch.Tensor, name, lambda *given, **more: pytest.fail("a tensor was filled"), raising=False
        )
    build(presets.bert_base(n_layers=1), device="meta")
    assert torch.nn.init.ones_(torch.empty(2)).tolist() == [1, 1]  # elsewhere it fills as ever


def test_only_the_three_kinds_can_be_built():
    with pytest.raises(TypeError, match=r"cannot build a model from Dense|violates type hint .*ModelConfig"):
        build(c.Dense(d_ff=3))
