"""Three faults, three tests."""

import math

import pytest
import torch

from glassformer.model import build
from glassformer.theory.claims.architecture import triage
from glassformer.theory.claims.claim import Lab


@pytest.mark.parametrize(
    ("faults", "failing"), [("", ""), ("M", "MC"), ("P", "P"), ("C", "C"), ("MP", "MPC"), ("MC", "MC"), ("PC", "PC")]
)
def test_patterns_of_failures(faults, failing):
    assert triage.signature(frozenset(faults), 0) == failing


def test_without_faults_it_is_the_engine():
    model = triage.faulty(frozenset(), 0)
    plain = build(model.config, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    tokens = torch.arange(9)[None]
    assert torch.equal(model(tokens), plain(tokens))


def test_a_shift_of_rotary_positions_is_no_fault():
    assert triage.mismatch(triage.faulty(frozenset("P"), 0, triage.c.Rotary())) < 1e-9
    assert triage.mismatch(triage.faulty(frozenset("P"), 0)) > 1e-3


def test_training_is_left_out_aloud_when_there_is_no_time():
    [left_out] = triage._leak_test(Lab())
    assert left_out.verdict == "skip"
    assert "--slow" in left_out.why


@pytest.mark.slow
def test_only_a_leak_brings_the_loss_below_the_entropy():
    causal, leaking = triage._leak_test(Lab(slow=True))
    assert causal.passed
    assert leaking.passed
    assert leaking.measured < math.log(24) - 2 < causal.measured
