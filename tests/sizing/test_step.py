"""What the optimizers keep, against the optimizers themselves."""

import typing
from dataclasses import replace

import pytest
import torch

from glassformer.config import presets
from glassformer.config.optimizer import OptimizerKind
from glassformer.model import build
from glassformer.sizing import training_memory
from glassformer.sizing.parameters import parameters
from glassformer.sizing.step import Optimizer, StepOptions, cast_weights, check_optimizer, states, temporaries
from glassformer.training.optimizers import Optimizer as Real
from glassformer.training.run import Optim

MODELS = {
    "gpt": presets.gpt2(n_layers=2, d_model=16, n_heads=2, vocab_size=31, max_len=8),
    "llama with grouped heads": presets.llama_tiny(n_layers=2, d_model=32, vocab_size=31),
    "experts": presets.moe_tiny(n_layers=2, d_model=32, vocab_size=31),
    "untied head": presets.llama_tiny(n_layers=2, d_model=32, vocab_size=31, head__tied=False),
}


def stepped(model, optimizer):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(1.0) if isinstance(optimizer, Real) else optimizer.step()
    return optimizer


def kept(held):
    """Bytes of state tensors, the step counters (one number each) excepted."""
    return sum(t.numel() * t.element_size() for t in held if isinstance(t, torch.Tensor) and t.dim())


@pytest.mark.parametrize("kind", typing.get_args(OptimizerKind))
@pytest.mark.parametrize("name", MODELS)
def test_states_are_those_that_training_keeps(name, kind):
    config = MODELS[name]
    model = build(config)
    optimizer = stepped(model, Real(model, Optim(kind=kind)))
    assert training_memory(config, 1, 8, optimizer=kind).optimizer == kept(optimizer.state().values())


def test_plain_sgd_keeps_nothing():
    model = build(MODELS["gpt"])
    sgd = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held = [value for state in sgd.state.values() for value in state.values()]
    assert training_memory(MODELS["gpt"], 1, 8, optimizer="sgd").optimizer == kept(held) == 0


def test_muon_keeps_less_than_adamw_and_more_than_nothing():
    config = presets.gpt2()
    adamw, muon = (training_memory(config, 1, 8, optimizer=kind).optimizer for kind in ("adamw", "muon"))
    matrices = 12 * 12 * 768**2  # q, k, v, o, up and down of 12 blocks
    assert adamw - muon == 4 * matrices


def test_every_optimizer_of_a_run_can_be_sized():
    assert set(typing.get_args(OptimizerKind)) < set(typing.get_args(Optimizer))
    for name in typing.get_args(Optimizer):
        assert check_optimizer(name) == name
        assert states("decoder.blocks.0.attention.q.weight", name) >= 0
    with pytest.raises(ValueError, match=r"optimizer='lion' is not known\. Use one of adamw, muon, sgd, none"):
        check_optimizer("lion")


def test_only_an_unfused_adamw_needs_temporaries():
    shapes = parameters(MODELS["gpt"])
    assert temporaries(shapes, 4, "adamw", fused=True) == 0
    assert temporaries(shapes, 4, "adamw", fused=False) == 2 * 4 * 16 * 64
    assert temporaries(shapes, 4, "muon", fused=True) > 0


def test_averaged_weights_cost_one_copy():
    plain = training_memory(MODELS["gpt"], 1, 8)
    averaged = training_memory(MODELS["gpt"], 1, 8, options=StepOptions(average=True))
    assert averaged.average == plain.weights
    assert averaged.peak == plain.peak + plain.weights


def test_copies_of_frozen_matrices_are_alive_in_every_phase():
    config = presets.gpt2(n_layers=2, d_model=32, n_heads=2, max_len=16, vocab_size=5003, dropout=0.0)
    adapted = tuple(name.removesuffix(".weight") for name in parameters(config) if name.endswith(".up.weight"))
    options = StepOptions(matmuls="bfloat16", adapted=adapted, rank=2, head_bytes=2**32, evaluation=64)
    plain, kept = (
        training_memory(config, 1, 16, options=replace(options, keeps_rounded=keeps)) for keeps in (False, True)
    )
    assert plain.moment == kept.moment == "evaluation"
    matrices = 2 * 12 * 32 * 32  # of two blocks
    assert plain.copies == 2 * matrices
    assert kept.copies == kept.peak - plain.peak == 2 * (matrices + 5003 * 32)
    trained = replace(options, keeps_rounded=True, adapted=(), frozen=("decoder.blocks.0.feedforward.up.weight",))
    assert cast_weights(config, parameters(config), 2, trained)[1] == 2 * 4 * 32 * 32
    narrow = replace(options, keeps_rounded=True, quantized=True)
    assert not narrow.keeps("decoder.blocks.0.feedforward.up.weight")
    assert narrow.keeps("decoder.blocks.0.feedforward.down.weight")
