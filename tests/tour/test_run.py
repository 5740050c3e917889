"""The whole tour, at a size that takes seconds."""

import json
import math

import pytest

from glassformer.finding import Verdict
from glassformer.tour import run as tour_run
from glassformer.tour import terminal
from glassformer.tour.generation import SAMPLERS
from glassformer.tour.training import Plan
from tests.tour.tiny import one_question, tiny_plan


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tour of seconds, and the events that its listener received."""
    events = []
    with pytest.MonkeyPatch.context() as patch:
        one_question(patch)
        return tour_run.run_tour(tiny_plan(tmp_path_factory.mktemp("tour")), events.append), events


def test_the_engine_equals_the_oracle_for_every_architecture():
    findings = list(tour_run.engine_against_oracle())
    assert len(findings) == 6
    assert all(f.passed for f in findings)
    assert all(f.measured > 0 for f in findings)  # exactly zero would mean something was compared with itself


def test_the_tour_goes_through_every_stage_in_order(finished):
    tour, events = finished
    assert [e["number"] for e in events if e["event"] == "stage"] == list(range(1, len(tour_run.STAGES)))
    assert tour.passed
    assert [f for f in tour.findings if f.verdict is Verdict.FAIL] == []
    reported = [e["finding"] for e in events if e["event"] == "finding"]
    assert reported == tour.findings
    assert {e["training_event"]["event"] for e in events if e["event"] == "training"} >= {
        "start",
        "step",
        "validation",
        "end",
    }


def test_training_learns_and_is_recorded(finished):
    tour, _ = finished
    record = tour.training
    assert record.validation[0][0] == 0
    losses = [loss for _, loss in record.validation]  # how many depends on the speed of the machine
    assert min(losses) == pytest.approx(record.best)
    assert record.final < tour.corpus.baselines["uniform"]
    assert record.final != record.best  # of the whole split, not of a part
    assert list(tour.corpus.baselines) == ["uniform", "unigram", "bigram", "5-gram"]
    assert record.validation[-1][0] == tour.run.loop.steps
    assert len(record.train) > 2


def test_both_sanity_checks_are_measured(finished):
    findings = {finding.id: finding for finding in finished[0].findings}
    initial = findings["initial loss within 2 % of ln V"]
    assert initial.bound == 0.02
    assert initial.evidence["on_text"] == finished[0].training.validation[0][1]
    assert initial.evidence["ln_v"] == pytest.approx(math.log(finished[0].corpus.vocab_size))
    overfit = findings["overfits one batch to a loss under 0.01"]
    assert overfit.measured <= overfit.bound == 0.01
    assert overfit.evidence["losses"][0] > 1


def test_every_sampler_continues_the_prompt(finished):
    samples = finished[0].samples
    assert [s.sampler for s in samples] == [*SAMPLERS, "4 beams"]
    assert all(s.text.startswith(s.prompt) and len(s.text) > len(s.prompt) for s in samples)
    assert len({s.text for s in samples}) > 3


def test_attention_rows_sum_to_one_and_hide_the_future(finished):
    seen = finished[0].attention
    n = len(seen.tokens)
    assert (len(seen.patterns), len(seen.patterns[0]), len(seen.patterns[0][0])) == (2, 2, n)
    for heads in seen.patterns:
        for pattern in heads:
            for t, row in enumerate(pattern):
                assert sum(row) == pytest.approx(1, abs=1e-5)
                assert all(weight == 0 for weight in row[t + 1 :])


def test_a_tour_is_one_json_object(finished):
    found = json.loads(json.dumps(finished[0].to_dict(), allow_nan=False))
    assert set(found) >= {"findings", "size", "corpus", "training", "samples", "cache", "samplers", "seconds"}
    assert [one["control"]["verdict"] for one in found["claims"]] == ["fail", "fail"]
    assert [one["healthy"] for one in found["doctor"]] == [True, False]


def test_claims_hold_and_the_missing_mask_is_found(finished):
    tour, events = finished
    findings = {finding.id: finding for finding in tour.findings}
    assert findings["claim: rope-relative"].passed
    assert findings["control fails: rope-relative"].passed
    assert findings["the doctor finds no bug in the trained model"].passed
    assert findings["the doctor finds the missing causal mask"].passed
    assert [e["result"] for e in events if e["event"] == "claim"] == tour.claims
    assert [e["result"] for e in events if e["event"] == "diagnosis"] == tour.diagnosed
    text = terminal.claim_text(tour.claims[1])
    assert "Bishop 12.3 is wrong" in text
    assert "pieces fail" in text
    assert "causal_leak" in terminal.diagnosis_text(tour.diagnosed[1])
    assert "fix:" not in terminal.diagnosis_text(tour.diagnosed[0])


def test_a_folder_that_cannot_be_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\): give another folder"):
        tour_run.run_tour(Plan(out=tmp_path / "file" / "below"))


@pytest.mark.parametrize("name", ["report.html", "trained", "adapted"])
def test_an_earlier_tour_is_refused_before_any_work(tmp_path, name):
    plan = tiny_plan(tmp_path)
    (plan.out / name).mkdir(parents=True)
    (plan.out / name / "old").write_text("mine")
    with pytest.raises(ValueError, match=rf"tour already holds an earlier tour \({name}\): pass --force"):
        tour_run.run_tour(plan, lambda event: pytest.fail("it began"))
    assert (plan.out / name / "old").read_text() == "mine"
