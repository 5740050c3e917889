"""Eval is deterministic, training random, and nothing is remembered."""

import pytest

from glassformer.doctor.probes import modes
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, buggy, failures, gpt2, names, t5


@pytest.mark.parametrize("make", [gpt2, t5])
def test_correct_models_pass(make):
    subject = make()
    assert modes.eval_is_deterministic(subject).passed
    assert modes.train_equals_eval(subject).passed
    assert failures(modes.nothing_is_remembered(subject)) == []


@pytest.mark.parametrize("id", ["drops_in_eval", "drops_faintly", "drops_in_kernel", "running_mean"])
def test_an_eval_that_differs_is_random_or_remembers(id):
    finding = modes.eval_is_deterministic(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert finding.id.split("/")[0] == BUGS[id].diagnosis


def test_dropout_that_stays_off_after_eval_is_found():
    assert modes.training_is_random(buggy("never_drops_again")).verdict is Verdict.FAIL
    assert modes.training_is_random(gpt2()).passed
    assert modes.dropout_probability(gpt2()) == 0.1


@pytest.mark.parametrize("id", ["trains_one_further", "stretched_in_eval"])
def test_other_positions_in_training_are_found(id):
    assert modes.train_equals_eval(buggy(id)).verdict is Verdict.FAIL


@pytest.mark.parametrize("id", ["shared_cache", "dynamic_base", "keeps_the_source"])
def test_what_is_kept_between_calls_is_found(id):
    assert names(modes.nothing_is_remembered(buggy(id))) == {"state_leak"}
