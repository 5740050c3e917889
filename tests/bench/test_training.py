"""Training: the same batches for everyone, and our step is nanoGPT's, loss by loss."""

import dataclasses

import pytest
import torch

import glassformer as gf
from glassformer import sizing
from glassformer.bench import subject as subjects
from glassformer.bench import training
from glassformer.bench.judge import LOSS
from glassformer.bench.peers.base import Order
from glassformer.bench.plan import Plan
from tests.bench import checkout

SETTING = training.Setting("tiny", gf.presets.nano(n_layers=2, d_model=32, d_ff=128, max_len=16), 4)


def order(folder, name, precision="float32", **more):
    made = subjects.write(folder, SETTING.config, "start", training.SEED, perturbed=False)
    return Order(name, name, "train", precision, str(made.root), 1, (), 3, setting=SETTING.facts(), **more)


def test_batches_depend_on_the_step_alone(tmp_path):
    given = order(tmp_path, "glassformer")
    inputs, targets = training.batch(given, 3)
    again = training.batch(dataclasses.replace(given, name="nanogpt"), 3)
    assert torch.equal(inputs, again[0])
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert not torch.equal(inputs, training.batch(given, 4)[0])
    assert inputs.shape == (4, 16)


@pytest.mark.usefixtures("clean_imports")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_losses_of_both_are_the_same(tmp_path, precision):
    (tmp_path / "theirs").mkdir()
    theirs = str(checkout.nanogpt(tmp_path / "theirs"))
    orders = [order(tmp_path, "glassformer", precision), order(tmp_path, "nanogpt", precision, checkout=theirs)]
    losses = []
    for given in orders:
        trainer = training.trainer(given)
        losses.append([float(trainer.step(*training.batch(given, step))) for step in range(8)])
    ours, nano = losses
    assert max(abs(a - b) for a, b in zip(ours, nano, strict=True)) < LOSS[precision]
    assert ours[-1] < ours[0] - 0.05


@pytest.fixture
def loaded(tmp_path):
    """The order of a contender that trains a preset of the folder."""

    def made(preset, name, module, precision="float32"):
        config = dataclasses.replace(gf.presets.get(preset), n_layers=2)
        folder = subjects.write(tmp_path, config, preset, 1, perturbed=False)
        plan = Plan("train", model=preset, batch=3, prompt=16)
        facts = training.setting_of(plan, folder).facts()
        return Order(name, module, "train", precision, str(folder.root), 1, (), 4, setting=facts)

    return made


@pytest.mark.parametrize("preset", ["llama_tiny", "moe_tiny", "nano"])
def test_transformers_and_ours_have_the_same_losses(loaded, preset):
    """Weights of seed 1, which our step would not draw itself: all contenders load the same folder."""
    pytest.importorskip("transformers")
    losses = []
    for given in (loaded(preset, "glassformer", "ours"), loaded(preset, "transformers", "hugging")):
        trainer = training.trainer(given)
        losses.append([float(trainer.step(*training.batch(given, 0))) for _ in range(6)])
    ours, theirs = losses
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-4
    assert ours[-1] < ours[0] - 0.01


def test_a_step_counts_its_tokens_or_one(loaded, tmp_path):
    assert training.tokens_per_step(loaded("llama_tiny", "glassformer", "ours")) == 3 * 16
    assert training.tokens_per_step(order(tmp_path, "glassformer")) == 1


def test_batches_of_a_model_hold_the_first_ids_only(loaded, tmp_path):
    given = loaded("llama_tiny", "glassformer", "ours")
    assert given.setting["vocabulary"] == 256  # its whole vocabulary is less than 512
    made = subjects.write(tmp_path, gf.presets.nano(vocab_size=1000, n_layers=1), "wide", 0)
    assert training.setting_of(Plan("train", model="nano"), made).facts()["vocabulary"] == training.USED


def test_the_default_length_is_shortened_to_what_the_model_has(tmp_path):
    plan = Plan("train", model="nano", layers=1, keep=tmp_path)
    setting = training.setting_of(plan, subjects.subject(plan))
    assert (setting.context, setting.name) == (64, "nano, 1 layer, 128 wide, context 64, batch 4")


def test_on_a_gpu_the_residual_stream_is_narrow_and_matmuls_can_be(loaded):
    def machine(precision, device="cuda"):
        given = dataclasses.replace(loaded("llama_tiny", "glassformer", "ours", precision), device=device)
        made = training.machine_of(given)
        return made.device, made.precision, made.stream, made.products

    assert machine("bfloat16") == ("cuda", "bfloat16", "bfloat16", "precision")
    assert machine("float8") == ("cuda", "bfloat16", "bfloat16", "float8")
    assert machine("float32") == ("cuda", "float32", "float32", "precision")
    assert machine("bfloat16", "cpu") == ("cpu", "bfloat16", "float32", "precision")


def test_the_first_steps_of_a_run_are_those_of_gf_train(loaded, tmp_path, monkeypatch):
    monkeypatch.setenv("GLASSFORMER_CACHE", str(tmp_path / "caches"))
    given = loaded("llama_tiny", "glassformer", "ours")
    subjects.write_words(given.text, given.words, 20, 256, 0)
    version, losses = training.first_steps_of_a_run(given)
    assert (version, len(losses)) == (gf.__version__, given.new)
    assert losses[-1] < losses[0]
    assert list((tmp_path / "caches" / "tokens").iterdir())  # its text was prepared


def test_the_settings_are_nanogpts():
    small, large = training.settings()
    assert sizing.count(small.config) == 804_096
    assert (large.config.d_model, large.config.max_len, large.batch, large.config.dropout) == (384, 256, 8, 0.0)
