"""Probes: they measure what they say, leave training alone, cost nothing when off, and are in the log."""

import dataclasses
import json
import math

import pytest
import torch

from glassformer.lens.figures.training import probe_series, read_log
from glassformer.lens.heads import head_table
from glassformer.model import build
from glassformer.training import open_session, read_run, resume_session, train
from glassformer.training.data.tasks import TaskData
from glassformer.training.probes import PROBES, accuracy, chosen_probes, head_scores, weight_norms
from glassformer.training.run import Probe
from tests import variants
from tests.training.tiny import session

TASK = (
    "model.n_layers=1",
    "model.d_model=12",
    "model.n_heads=3",
    "model.d_ff=24",
    "model.max_len=12",
    "model.dropout=0.1",
    "data.corpus=task:repeat",
    "task.shortest=3",
    "task.longest=5",
    "loop.steps=6",
    "loop.batch=4",
    "loop.eval_every=6",
    "loop.eval_batches=2",
    "loop.checkpoint_every=3",
    "schedule.kind=constant",
    "schedule.warmup=0",
    "machine.device=cpu",
    "machine.precision=float32",
)


def run_of(folder, *changes):
    return open_session(read_run("", (*TASK, f'out="{folder}"', *changes)))


def fake(model, data, run):
    assert not model.training
    assert not torch.is_grad_enabled()
    torch.rand(3)  # a careless probe: it draws from the generator that dropout uses
    return {"induction": [[0.25, 0.5, None]]}


def test_squares_of_the_parts_add_up_to_that_of_the_whole():
    model = build(variants.decoder())
    norms = weight_norms(model, None, None)
    total = norms.pop("total")
    assert total == pytest.approx(math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters())))
    assert total == pytest.approx(math.sqrt(sum(value**2 for value in norms.values())))
    assert set(norms) == {"embedding", "positions", "attention", "feedforward", "norms"}


def test_accuracy_counts_targets_that_are_asked_for(tmp_path):
    """A model that answers 7 whatever it reads is right where 7 is asked for."""
    made = run_of(tmp_path)
    model = build(dataclasses.replace(made.run.model, head=dataclasses.replace(made.run.model.head, bias=True)))
    with torch.no_grad():
        model.embed.tokens.weight.zero_()
        model.head.bias.zero_()
        model.head.bias[7] = 1.0
    _, targets = made.data.order(made.run).batch(0)
    asked = targets[targets != -100]
    found = accuracy(model, made.data, made.run)
    assert found["train"] == pytest.approx(float((asked == 7).double().mean()))
    assert 0 <= found["validation"] < 0.5


@pytest.mark.parametrize("preset", ["nano", "bert_base", "transformer_base"])
def test_accuracy_is_that_of_the_objective(tmp_path, preset):
    made = session(tmp_path, f"model.preset={preset}", *(["model.n_encoder_layers=1"] if "trans" in preset else []))
    found = accuracy(build(made.run.model), made.data, made.run)
    assert all(0 <= value < 0.5 for value in found.values())


def test_probing_changes_nothing_that_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(PROBES, "heads", fake)
    off = run_of(tmp_path / "off")
    on = run_of(tmp_path / "on", "probe.every=2", "probe.heads=true")
    plain = train(off.run, off.data)
    probed = train(on.run, on.data)
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, probed.model.state_dict()[name]), name
    assert probed.model.training


def measured(folder):
    return [event for event in read_log(folder) if event["event"] == "probe"]


def test_the_log_has_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(PROBES, "heads", fake)
    made = run_of(tmp_path, "probe.every=2", "probe.heads=true")
    events = []
    train(made.run, made.data, events.append)
    assert [e["step"] for e in events if e["event"] == "probe"] == [0, 2, 4, 6]
    found = measured(tmp_path)
    assert [e["step"] for e in found] == [0, 2, 4, 6]
    assert all(e["heads"]["induction"] == [[0.25, 0.5, None]] for e in found)
    curves = probe_series(found)
    assert len(curves["accuracy validation"][1]) == len(curves["norms total"][1]) == 4
    assert all(value > 0 for value in curves["norms attention"][1])


def test_a_resumed_run_goes_on_measuring_and_measures_nothing_twice(tmp_path):
    made = run_of(tmp_path, "probe.every=2", "loop.steps=3")
    train(made.run, made.data)
    again = resume_session(str(tmp_path), ("loop.steps=6",))
    train(again.run, again.data, resume=again.resume)
    steps = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in steps if e["event"] == "probe"] == [0, 2, 4, 6]


def test_the_averaged_weights_are_what_is_measured(tmp_path):
    made = run_of(tmp_path, "probe.every=6", "optim.ema=0.9", "probe.accuracy=false")
    state = train(made.run, made.data)
    averaged = math.sqrt(sum(float(value.double().square().sum()) for value in state.average.weights.values()))
    assert measured(tmp_path)[-1]["norms"]["total"] == pytest.approx(averaged)


def test_no_step_size_no_probes():
    assert not Probe(heads=True).every
    assert set(chosen_probes(Probe(every=5))) == {"norms", "accuracy"}
    assert chosen_probes(Probe(every=5, norms=False, accuracy=False)) == {}


def test_every_probe_that_a_run_can_select_exists():
    selectable = {field.name for field in dataclasses.fields(Probe)} - {"every"}
    assert selectable == set(PROBES) == set(chosen_probes(Probe(every=1, norms=True, accuracy=True, heads=True)))


def test_head_scores_are_those_of_the_lens():
    model = build(variants.decoder())
    found = head_scores(model, None, read_run("", TASK))
    table = head_table(model, seed=0, weights=False)
    assert found["induction"] == table.score("induction").tolist()
    assert found["previous"] == table.score("previous_token").tolist()


def test_a_run_logs_the_scores_of_every_head(tmp_path):
    made = run_of(tmp_path, "probe.every=3", "probe.heads=true", "model.n_layers=2", "model.dropout=0.0")
    state = train(made.run, made.data)
    found = measured(tmp_path)
    assert len(found) == 3
    assert all(torch.tensor(e["heads"]["induction"]).shape == (2, 3) for e in found)
    last = head_scores(state.model.eval(), made.data, made.run)
    assert torch.allclose(torch.tensor(found[-1]["heads"]["previous"]), torch.tensor(last["previous"]))


def test_a_context_without_room_for_a_repetition_is_refused(tmp_path):
    changes = ("data.corpus=task:modular-addition", "task.p=5", "model.max_len=3", f'out="{tmp_path}"')
    run = [change for change in TASK if not change.startswith(("data.", "task.", "model.max_len"))]
    made = open_session(read_run("", (*run, "probe.every=1", "probe.heads=true", *changes)))
    with pytest.raises(ValueError, match="leave no room for a repeated block"):
        train(made.run, made.data)


def test_a_task_is_a_source_like_any_other(tmp_path):
    assert isinstance(run_of(tmp_path).data, TaskData)
