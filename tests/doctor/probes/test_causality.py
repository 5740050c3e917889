"""The future cannot change the past, and a leak is found with its layer."""

import pytest
import torch

from glassformer.doctor.probes import causality
from glassformer.doctor.subject.adapt import subject_of
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, buggy, failures, gpt2, listed, rotary, t5


@pytest.mark.parametrize("make", [gpt2, rotary, t5])
def test_correct_models_do_not_leak_in_any_mode(make):
    findings = listed(causality.future_token(make()))
    assert all(f.verdict is Verdict.PASS and f.measured == 0 for f in findings)
    assert len(findings) == 3


@pytest.mark.sample(2)
@pytest.mark.parametrize("id", ["no_causal_mask", "leak_one_head", "leak_beyond_64", "leak_block_means", "leak_target"])
def test_leaks_of_every_reach_are_found(id):
    assert "causal_leak/future-token" in failures(causality.future_token(buggy(id)))


def test_a_leak_in_training_alone_is_found_there_alone():
    assert failures(causality.future_token(buggy("leak_in_training"))) == ["causal_leak/train-mode"]


@pytest.mark.parametrize("id", ["leak_one_layer", "leak_one_head", "leak_fused_layer"])
def test_bisection_names_the_first_layer_that_leaks(id):
    subject = buggy(id)
    block = causality.first_leaking_block(subject, warm=6.0)
    assert causality.layer_number(block, subject) == BUGS[id].layer
    assert causality.first_leaking_block(gpt2()) is None


def test_the_leak_matrix_is_zero_above_the_diagonal_of_a_causal_model():
    with gpt2().isolated(6.0) as isolated:
        matrix = causality.leak_matrix(isolated, 8)
    assert torch.equal(matrix > 0, torch.ones(8, 8, dtype=torch.bool).tril())
    with buggy("no_causal_mask").isolated(6.0) as isolated:
        assert bool((causality.leak_matrix(isolated, 8) > 0).all())


def test_a_declared_prefix_may_see_itself():
    from tests.bugs.healthy import WARD

    healthy = next(h for h in WARD if h.id.endswith("prefix-lm"))
    declared = subject_of(healthy.build(), kind="decoder", expect=dict(healthy.expect))
    assert failures(causality.future_token(declared)) == []
    assert failures(causality.future_token(subject_of(healthy.build(), kind="decoder")))
