"""The doctor names planted bugs, with their layer, and leaves healthy models in peace. The whole zoo is slow."""

import pytest
import torch

import glassformer as gf
from glassformer.doctor.probes import CannotExamineError
from tests.bugs.healthy import WARD
from tests.bugs.zoo import ZOO
from tests.doctor.subject.test_isolate import in_a_thread

EXAMPLES = (
    *("no_causal_mask", "cache_never_grows", "position_restarts", "position_never_added", "scale_missing"),
    *("mask_ignored", "drops_in_eval", "head_not_tied"),
)
"""The eight of the contract."""
QUICKLY = ("no_causal_mask",)
"""One of them by default; tests/doctor/probes has the probes of the others."""
BUGS = {bug.id: bug for bug in ZOO}


def examine(bug):
    reference = bug.reference() if bug.reference else None
    return gf.diagnose(bug.build(), kind=bug.kind, reference=reference, expect=dict(bug.expect))


@pytest.mark.parametrize("id", [id if id in QUICKLY else pytest.param(id, marks=pytest.mark.slow) for id in EXAMPLES])
def test_the_eight_examples_are_named_first(id):
    report = examine(BUGS[id])
    assert not report.healthy
    assert report.diagnoses[0].id == BUGS[id].diagnosis
    assert report.diagnoses[0].remedy


@pytest.mark.slow
@pytest.mark.parametrize("bug", ZOO, ids=lambda bug: bug.id)
def test_every_bug_of_the_zoo_is_named_first_with_its_layer(bug):
    report = examine(bug)
    assert report.diagnoses, report.text()
    assert report.diagnoses[0].id in (bug.diagnosis, *bug.also), report.text()
    assert bug.layer is None or report.diagnoses[0].layer == bug.layer, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("healthy", WARD, ids=lambda healthy: healthy.id)
def test_no_healthy_subject_raises_an_alarm(healthy):
    report = gf.diagnose(healthy.build(), healthy.kind, vocab_size=healthy.vocab_size, expect=dict(healthy.expect))
    assert report.healthy, report.text()


@pytest.mark.parametrize("id", [pytest.param("odd-dict-output", marks=pytest.mark.slow), "hf-bert"])
def test_some_healthy_subjects_raise_no_alarm(id):
    healthy = next(h for h in WARD if h.id == id)
    report = gf.diagnose(healthy.build(), healthy.kind, vocab_size=healthy.vocab_size)
    assert report.healthy, report.text()
    assert report.counts["pass"] > 20


@pytest.mark.slow
def test_a_leak_in_one_layer_is_placed_there_with_its_matrix():
    report = gf.diagnose(BUGS["leak_one_layer"].build(), quick=True)
    assert report.diagnoses[0].layer == 1
    assert len(report.pictures["leak"]) == 12


def test_the_model_given_is_not_changed():
    model = BUGS["cache_never_grows"].build().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    gf.diagnose(model, quick=True)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_are_not_finite_are_reported_and_not_taken_for_a_mask():
    model = BUGS["no_causal_mask"].build()
    name, parameter = next((n, p) for n, p in model.named_parameters() if p.ndim == 2)
    with torch.no_grad():
        parameter[0, 0] = float("nan")
    with pytest.raises(CannotExamineError, match=f"1 of the .* numbers in {name} are NaN or infinite"):
        gf.diagnose(model)


def test_a_time_limit_stops_the_examination():
    with pytest.raises(CannotExamineError, match="took more than"):
        gf.diagnose(BUGS["no_causal_mask"].build(), seconds=0.05)


def test_a_time_limit_holds_in_any_thread():
    error = in_a_thread(lambda: gf.diagnose(BUGS["no_causal_mask"].build(), seconds=0.05))
    assert isinstance(error, CannotExamineError)
    assert "took more than 0.05 s" in str(error)
