"""The model of the first step."""

import torch

import glassformer as gf
from glassformer.training import read_run
from glassformer.training.tuning.prepare import tuned_model
from tests.training.tuning.models import character_model


def test_a_resumed_run_does_not_read_the_start(tmp_path):
    folder = character_model(tmp_path / "model")
    run = read_run("", (f'start.model="{folder}"', 'optim.freeze=["embed"]'))
    started, resumed = tuned_model(run, "cpu", False), tuned_model(run, "cpu", True)
    base = gf.load(folder)
    assert torch.equal(started.embed.tokens.weight, base.embed.tokens.weight)
    assert not torch.equal(resumed.embed.tokens.weight, base.embed.tokens.weight)
    assert not started.embed.tokens.weight.requires_grad
    assert not resumed.embed.tokens.weight.requires_grad
