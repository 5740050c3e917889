"""The layer of a fault is found by comparing blocks of two runs that should agree."""

import pytest

from glassformer.doctor.locate import FINDERS, first_apart, layer_of_fault
from glassformer.finding import Finding, Verdict
from tests.doctor.probes.subjects import BUGS, buggy, gpt2

PLACED = ["leak_one_layer", "mask_ignored_one_layer", "reorder_skips_a_layer", "crop_keeps_the_tail", "running_mean"]


@pytest.mark.parametrize("id", PLACED)
def test_faults_of_one_layer_are_placed_there(id):
    bug = BUGS[id]
    finding = Finding(f"{bug.diagnosis}/probe", Verdict.FAIL)
    assert layer_of_fault(buggy(id), [finding]) == bug.layer


def test_nothing_is_placed_where_runs_agree_or_are_not_compared():
    for name in FINDERS:
        assert layer_of_fault(gpt2(), [Finding(f"{name}/probe", Verdict.FAIL)]) is None
    assert layer_of_fault(gpt2(), [Finding("weight_tying/same", Verdict.FAIL)]) is None


def test_the_first_block_apart_is_the_first():
    import torch

    one = {"0": torch.ones(2), "1": torch.ones(2), "2": torch.ones(2)}
    two = {"0": torch.ones(2), "1": torch.zeros(2), "2": torch.zeros(2)}
    assert first_apart(one, two, lambda t: t, 1e-6) == "1"
