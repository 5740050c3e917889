"""The reported loss against our own cross-entropy, by value and by gradient."""

import pytest
import torch

from glassformer.checks import training
from glassformer.finding import Verdict
from tests.bugs.healthy_traps import nano_style
from tests.checks.patients import BUGS, failures, gpt2, listed, names, sick, sound, warmed


def test_a_model_without_a_loss_is_not_judged():
    assert {f.verdict for f in listed(training.label_shift(gpt2()))} == {Verdict.SKIP}


@pytest.mark.parametrize("id", ["labels_not_shifted", "target_shifted_twice"])
def test_correct_losses_pass(id):
    assert failures(training.label_shift(sound(id))) == []


@pytest.mark.parametrize(
    "id", ["labels_not_shifted", "labels_shifted_twice", "labels_shifted_flat", "target_shifted_twice"]
)
def test_other_shifts_are_named(id):
    assert failures(training.label_shift(sick(id))) == ["label_shift/gradient"]


@pytest.mark.parametrize("id", ["padding_counted", "mean_of_means", "zero_ignored", "divided_by_all"])
def test_other_targets_are_found(id):
    assert names(training.label_shift(sick(id))) == {BUGS[id].diagnosis}


def test_a_caller_who_shifts_is_right_too():
    findings = listed(training.label_shift(warmed(nano_style(), kind="decoder")))
    assert failures(findings) == []
    assert any("shift 0" in f.why for f in findings)


def test_own_loss_is_cross_entropy_at_a_shift():
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    expected = torch.nn.functional.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten())
    assert torch.isclose(training.own_loss(logits, labels, 2), expected)
    assert training.own_loss(logits, labels, 0) != training.rows_mixed(logits, labels)


@pytest.mark.slow
def test_a_batch_is_learned_by_heart_and_noise_is_not():
    assert training.overfits_one_batch(gpt2()).passed
    assert training.below_entropy(gpt2()).passed
    assert training.below_entropy(sick("no_causal_mask")).verdict is Verdict.FAIL
