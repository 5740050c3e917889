"""Tying, registration, round trip and initial sizes."""

import pytest

from glassformer.doctor.probes import weights
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import bert, buggy, failures, gpt2, rotary, t5


@pytest.mark.parametrize("make", [gpt2, rotary, bert, t5])
def test_correct_models_pass(make):
    subject = make()
    for check in (weights.tying, weights.round_trip, weights.registered, weights.initial_loss):
        assert failures(check(subject)) == []
    assert weights.tying(gpt2()).passed


@pytest.mark.parametrize(
    ("id", "words"),
    [("head_not_tied", "two tensors"), ("copy_unties", "a deep copy"), ("load_unties", "load_state_dict")],
)
def test_tying_that_is_not_there_or_comes_apart_is_found(id, words):
    finding = weights.tying(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert words in finding.why


def test_a_module_in_a_plain_list_is_not_registered():
    finding = weights.registered(buggy("mlp_unregistered"))
    assert finding.verdict is Verdict.FAIL
    assert finding.evidence["layer"] == 2


@pytest.mark.parametrize("id", ["tied_embedding_std_1", "head_std_1"])
def test_a_head_that_starts_too_large_is_found(id):
    assert failures(weights.initial_loss(buggy(id))) == ["init_loss/ln-V"]
