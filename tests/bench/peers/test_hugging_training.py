"""transformers takes full training steps: what decays, what is clipped, and which experts it has."""

import pytest
import torch

pytest.importorskip("transformers")

import glassformer as gf
from glassformer.bench import subject, training
from glassformer.bench.peers import hugging_training
from glassformer.bench.peers.base import Order
from glassformer.bench.plan import Plan


def order(folder, preset, precision="float32", name="transformers"):
    config = gf.config.replace(gf.presets.get(preset), n_layers=1)
    made = subject.write(folder, config, preset, 0, perturbed=False)
    facts = training.setting_of(Plan("train", model=preset, batch=2, prompt=8), made).facts()
    return Order(name, "hugging", "train", precision, str(made.root), 1, (), 4, setting=facts)


def test_matrices_decay_and_norms_biases_and_positions_do_not(tmp_path):
    trainer = hugging_training.Trainer(order(tmp_path, "nano"))
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    decayed, spared = ({names[id(p)] for p in group["params"]} for group in hugging_training.groups(trainer.model))
    assert any("c_attn.weight" in name for name in decayed)
    assert any("wte" in name for name in decayed)
    assert {name for name in spared if "wpe" in name}
    assert not any("ln_" in name or name.endswith("bias") for name in decayed)
    assert len(decayed | spared) == len(names)


def test_a_step_in_bfloat16_keeps_weights_in_float32(tmp_path):
    given = order(tmp_path, "llama_tiny", "bfloat16")
    trainer = hugging_training.Trainer(given)
    losses = [float(trainer.step(*training.batch(given, 0))) for _ in range(4)]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert losses[-1] < losses[0]
    assert all(p.grad is None for p in trainer.model.parameters())


def test_experts_are_grouped_where_the_version_has_that(tmp_path, monkeypatch):
    given = order(tmp_path, "moe_tiny")
    model, version = hugging_training.load(given)
    assert version.endswith("grouped_mm")
    assert model.config._experts_implementation == "grouped_mm"
    package = hugging_training.quiet_package()
    real = package.AutoModelForCausalLM.from_pretrained

    def older(folder, **options):
        if "experts_implementation" in options:
            raise TypeError("unexpected keyword argument")
        return real(folder, **options)

    monkeypatch.setattr(package.AutoModelForCausalLM, "from_pretrained", older)
    assert "grouped" not in hugging_training.load(given)[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_the_compiled_step_has_the_losses_of_the_plain_one(tmp_path):
    plain, compiled = (order(tmp_path, "llama_tiny", name=name) for name in ("transformers", "transformers-compiled"))
    losses = []
    for given in (plain, compiled):
        trainer = training.trainer(given)
        losses.append([float(trainer.step(*training.batch(given, step))) for step in range(3)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
