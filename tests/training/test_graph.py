"""Captured steps against ordinary ones, where there is a GPU; src/glassformer/bench/gpu/cuda_check.py runs the same."""

import dataclasses

import pytest
import torch

from glassformer.training import graph
from glassformer.training.graph import CapturedStep, Reading, can_capture
from glassformer.training.health import NonFinite
from glassformer.training.loop import prepare_state, train_step
from glassformer.training.objective import Batch
from glassformer.training.optimizers import DeadGradient
from tests.training import tiny


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_captured_steps_equal_ordinary_ones():
    from glassformer.bench.gpu.cuda_check import captured_step_equals_eager

    assert all(finding.passed for finding in captured_step_equals_eager())


def test_a_cpu_does_not_capture(tmp_path):
    assert not can_capture(prepare_state(tiny.session(tmp_path).run))


class Uncaptured(CapturedStep):
    """The same logic where there is no CUDA: the body runs at every replay, and results are read as they come."""

    def replay(self):
        self._body(self.batch)

    def _capture(self, batch):
        self.batch = dataclasses.replace(batch, inputs=batch.inputs.clone(), targets=batch.targets.clone())
        self.graph = self

    def _read(self, batch):
        done = type("Done", (), {"synchronize": lambda self: None})()
        return Reading(batch, self.results.clone(), done)


@pytest.fixture(params=["adamw", "muon"])
def run(request, tmp_path):
    run = tiny.session(tmp_path).run
    return dataclasses.replace(run, optim=dataclasses.replace(run.optim, kind=request.param, ema=None))


def batches(run, n):
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        ids = torch.randint(0, run.model.vocab_size, (run.loop.batch, run.context + 1), generator=generator)
        yield Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def weights(state):
    return [p.detach().clone() for p in state.parameters]


def test_the_body_of_a_captured_step_is_an_ordinary_step(run):
    plain, captured = prepare_state(run), prepare_state(run)
    step = Uncaptured(captured)
    for batch in batches(run, 6):
        wanted, found = train_step(plain, batch), step(captured, batch)
        assert float(found["loss"]) == pytest.approx(wanted["loss"], rel=1e-5)
        assert float(found["gradient_norm"]) == pytest.approx(wanted["gradient_norm"], rel=1e-4)
    captured.settle()
    assert captured.step == plain.step == 6
    assert max((a - b).abs().max() for a, b in zip(weights(plain), weights(captured), strict=True)) < 1e-3


def test_nan_is_found_by_the_next_step_and_neither_happens(run):
    state = prepare_state(run)
    step, (*good, last) = Uncaptured(state), batches(run, 6)
    for batch in good:
        step(state, batch)
    held = state.parameters[0].detach().clone()
    with torch.no_grad():
        state.parameters[0].fill_(float("nan"))
    before = weights(state)
    step(state, last)  # not examined yet
    with pytest.raises(NonFinite, match=r"step 5: .*first at"):
        step(state, good[0])
    assert state.step == 5
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(before, weights(state), strict=True))
    with torch.no_grad():
        state.parameters[0].copy_(held)
    step(state, last)  # reported once: it can go on
    state.settle()
    assert state.step == 6
    assert not all(torch.equal(a, b) for a, b in zip(before[1:], weights(state)[1:], strict=True))


def test_who_wants_to_look_at_the_state_learns_of_a_step_that_did_not_happen(run):
    state = prepare_state(run)
    step = Uncaptured(state)
    for batch in batches(run, 4):
        step(state, batch)
    with torch.no_grad():
        state.parameters[0].fill_(float("inf"))
    step(state, batch)
    with pytest.raises(NonFinite, match="step 4:"):
        state.settle()
    state.settle()  # reported once
    assert state.step == 4


def test_a_gradient_of_nothing_is_reported_with_its_step(run, monkeypatch):
    state = prepare_state(run)
    step = Uncaptured(state)
    for batch in batches(run, 5):
        step(state, batch)
    monkeypatch.setattr(graph, "gradient_norm", lambda parameters: torch.zeros(()))
    step(state, batch)
    with pytest.raises(DeadGradient, match="step 6 "):
        step(state, batch)


def test_a_sound_step_after_one_that_failed_does_not_happen_either(run, monkeypatch):
    """It was begun before anybody knew."""
    state = prepare_state(run)
    step = Uncaptured(state)
    for batch in batches(run, 5):
        step(state, batch)
    before, norm, calls = weights(state), graph.gradient_norm, []

    def once(parameters):
        calls.append(len(calls))
        return torch.tensor(float("nan")) if len(calls) == 1 else norm(parameters)

    monkeypatch.setattr(graph, "gradient_norm", once)
    step(state, batch)
    with pytest.raises(NonFinite, match="step 5:"):
        step(state, batch)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(before, weights(state), strict=True))
