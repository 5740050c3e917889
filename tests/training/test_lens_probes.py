"""Head scores while training: the same numbers as the lens gives, in the log, one grid of layers and heads per step."""

import pytest
import torch

from glassformer.lens.heads import head_table
from glassformer.model import build
from glassformer.training import open_session, read_run, train
from glassformer.training.lens_probes import PROBES, head_scores
from glassformer.training.probes import read_curves
from tests import variants

RUN = (
    "model.n_layers=2",
    "model.d_model=12",
    "model.n_heads=3",
    "model.d_ff=24",
    "model.max_len=12",
    "data.corpus=task:repeat",
    "task.shortest=3",
    "task.longest=5",
    "loop.steps=2",
    "loop.batch=4",
    "loop.eval_batches=1",
    "schedule.warmup=0",
    "machine.device=cpu",
    "probe.every=1",
    "probe.heads=true",
)


def test_grids_are_the_lens_scores():
    model = build(variants.decoder())
    found = head_scores(model, None, read_run("", RUN))
    table = head_table(model, seed=0, weights=False)
    assert found["induction"] == table.score("induction").tolist()
    assert found["previous"] == table.score("previous_token").tolist()


def test_a_run_logs_the_scores_of_every_head(tmp_path):
    made = open_session(read_run("", (*RUN, f'out="{tmp_path}"')))
    state = train(made.run, made.data, probes=PROBES)
    curves = read_curves(tmp_path)
    heads = curves.heads("induction")
    assert sorted(heads) == [(layer, head) for layer in range(2) for head in range(3)]
    assert all(len(curve) == 3 for curve in heads.values())
    last = head_scores(state.model.eval(), made.data, made.run)
    assert torch.allclose(torch.tensor(curves["heads.previous"][-1]), torch.tensor(last["previous"]))


def test_a_context_without_room_for_a_repetition_is_said_in_words(tmp_path):
    changes = ("data.corpus=task:modular-addition", "task.p=5", "model.max_len=3", f'out="{tmp_path}"')
    run = [change for change in RUN if not change.startswith(("data.", "task.", "model.max_len"))]
    made = open_session(read_run("", (*run, *changes)))
    with pytest.raises(ValueError, match="have no room for a repeated block"):
        train(made.run, made.data, probes=PROBES)
