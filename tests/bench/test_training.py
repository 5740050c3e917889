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
        losses.append([trainer.step(*training.batch(given, step)) for step in range(8)])
    ours, nano = losses
    assert max(abs(a - b) for a, b in zip(ours, nano, strict=True)) < LOSS[precision]
    assert ours[-1] < ours[0] - 0.05


def test_the_settings_are_nanogpts():
    small, large = training.settings()
    assert sizing.count(small.config) == 804_096
    assert (large.config.d_model, large.config.max_len, large.batch, large.config.dropout) == (384, 256, 8, 0.0)
