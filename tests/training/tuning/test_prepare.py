"""The model of the first step."""

import torch

import glassformer as gf
from glassformer.training import read_run, train_step
from glassformer.training.loop import prepare_state
from glassformer.training.objective import Batch
from glassformer.training.tuning.prepare import tuned_model
from tests.training.tuning.models import CHARACTERS, character_model


def test_a_resumed_run_does_not_read_the_start(tmp_path):
    folder = character_model(tmp_path / "model")
    run = read_run("", (f'start.model="{folder}"', 'optim.freeze=["embed"]'))
    started, resumed = tuned_model(run, "cpu", False), tuned_model(run, "cpu", True)
    base = gf.load(folder)
    assert torch.equal(started.embed.tokens.weight, base.embed.tokens.weight)
    assert not torch.equal(resumed.embed.tokens.weight, base.embed.tokens.weight)
    assert not started.embed.tokens.weight.requires_grad
    assert not resumed.embed.tokens.weight.requires_grad


def test_rows_of_no_token_stay_as_they_are(tmp_path):
    """The table has a row more than the tokenizer. Weight decay and the softmax of a tied head would change it."""
    folder, n = character_model(tmp_path / "model"), len(CHARACTERS)
    changes = ("optim.weight_decay=0.5", "optim.lr=0.1", "machine.device=cpu", f"start.n_tokens={n}")
    state = prepare_state(read_run("", (f'start.model="{folder}"', *changes)))
    before = state.model.embed.tokens.weight.detach().clone()
    assert len(before) == n + 1
    tokens = torch.arange(8)[None]
    for _ in range(2):
        train_step(state, Batch(tokens, tokens.roll(-1, 1)))
    table = state.model.embed.tokens.weight
    assert torch.equal(table[n:], before[n:])
    assert not torch.any(table.grad[n:])
    assert bool((table[:n] != before[:n]).any(1).all())  # weight decay alone changes every row
