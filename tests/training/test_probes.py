"""Probes: they measure what they say, leave training alone, cost nothing when off, and come back as curves."""

import dataclasses
import json
import math

import pytest
import torch

from glassformer.model import build
from glassformer.training import open_session, read_run, resume_session, train
from glassformer.training.data.corpus import DataError
from glassformer.training.data.tasks import TaskData
from glassformer.training.probes import OWN, Curves, accuracy, chosen_probes, read_curves, weight_norms
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


def test_probing_changes_nothing_that_is_trained(tmp_path):
    off = run_of(tmp_path / "off")
    on = run_of(tmp_path / "on", "probe.every=2", "probe.heads=true")
    plain = train(off.run, off.data)
    probed = train(on.run, on.data, probes={"heads": fake})
    for name, value in plain.model.state_dict().items():
        assert torch.equal(value, probed.model.state_dict()[name]), name
    assert probed.model.training


def test_curves_come_back_from_the_log(tmp_path):
    made = run_of(tmp_path, "probe.every=2", "probe.heads=true")
    events = []
    train(made.run, made.data, events.append, probes={"heads": fake})
    assert [e["step"] for e in events if e["event"] == "probe"] == [0, 2, 4, 6]
    curves = read_curves(tmp_path)
    assert curves.steps == [0, 2, 4, 6]
    assert len(curves["accuracy.validation"]) == len(curves["norms.total"]) == 4
    assert all(value > 0 for value in curves["norms.attention"])
    assert curves.heads() == {(0, 0): [0.25] * 4, (0, 1): [0.5] * 4, (0, 2): [None] * 4}
    with pytest.raises(DataError, match=r"no probe measured 'norm': there are accuracy\.train"):
        curves["norm"]


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
    assert read_curves(tmp_path)["norms.total"][-1] == pytest.approx(averaged)


def test_no_step_size_no_probes():
    assert chosen_probes(Probe(heads=True), {}) == {}
    assert set(chosen_probes(Probe(every=5), {})) == {"norms", "accuracy"} == set(OWN)
    assert chosen_probes(Probe(every=5, norms=False, accuracy=False), {}) == {}


def test_a_probe_that_nobody_provides_is_refused_before_training(tmp_path):
    made = run_of(tmp_path, "probe.every=2", "probe.heads=true")
    with pytest.raises(DataError, match=r"probe\.heads=true, but nobody measures it here"):
        train(made.run, made.data)
    assert not (tmp_path / "log.jsonl").exists()


def test_logs_without_probes_are_said_to_have_none(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "step", "step": 1}\n{"event": "probe", "st')
    with pytest.raises(DataError, match=r"no probe events: train with --set probe\.every=50"):
        read_curves(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read_curves(tmp_path / "nowhere.jsonl")
    assert Curves().steps == []


def test_a_task_is_a_source_like_any_other(tmp_path):
    assert isinstance(run_of(tmp_path).data, TaskData)
