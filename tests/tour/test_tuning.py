"""Adapters of the bundled model, and the answers of the bundled adapter."""

import dataclasses

import pytest
import torch

from glassformer import pretrained
from glassformer.finding import Verdict
from glassformer.tour import tuning
from tests.tour.tiny import one_question, tiny_plan


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    events = []
    with pytest.MonkeyPatch.context() as patch:
        one_question(patch)
        return *tuning.adapt(tiny_plan(tmp_path_factory.mktemp("tuning"), tuning_steps=3), events.append), events


@pytest.mark.slow  # the tour as a whole (test_run.py) goes through this stage
def test_adapters_learn_and_the_base_does_not_change(adapted):
    record, findings, events = adapted
    assert [finding.id for finding in findings if not finding.passed] == []
    assert len(findings) == 4
    assert [step for step, _ in record.validation] == [0, 3]
    assert record.trained < record.parameters / 10
    assert [event["result"] for event in events if event["event"] == "tuning"] == record.validation
    assert [event["result"] for event in events if event["event"] == "answer"] == record.answers
    assert all(one.base != one.answer == one.expected for one in record.answers)


@pytest.mark.slow
def test_each_check_can_fail(adapted):
    record, _, _ = adapted
    worse = dataclasses.replace(record, validation=[(0, 2.0), (3, 1.9)])
    assert tuning._learned(worse).verdict is Verdict.FAIL
    wrong = [dataclasses.replace(record.answers[0], answer="no")]
    assert tuning._answered(wrong).measured == 1
    model = tuning.load("bard", dtype="float32")
    assert tuning._unchanged(model).passed
    with torch.no_grad():
        model.embed.tokens.weight[0, 0] += 1e-3
    assert tuning._unchanged(model).measured == 1
    assert tuning._merged(model, pretrained.FOLDERS["bard"]).verdict is Verdict.FAIL


def test_without_the_bundled_adapter_the_stage_is_skipped(monkeypatch, tmp_path):
    monkeypatch.delitem(pretrained.FOLDERS, "bard-chat")
    _, findings = tuning.adapt(tiny_plan(tmp_path), lambda event: None)
    assert [finding.verdict for finding in findings] == [Verdict.SKIP]
