"""A row does not depend on its neighbours."""

import pytest

from glassformer.doctor.probes import batching, subject_of
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import bert, buggy, failures, gpt2, listed, t5


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_correct_models_keep_rows_apart(make):
    assert failures(batching.batch_invariance(make())) == []


@pytest.mark.parametrize("id", ["centred_over_batch", "norm_over_batch"])
def test_shared_statistics_are_found(id):
    assert "batch_variance/neighbour" in failures(batching.batch_invariance(buggy(id)))


def test_experts_with_a_capacity_are_not_judged():
    declared = subject_of(gpt2().model, expect={"capacity_factor": 1.25})
    assert {f.verdict for f in listed(batching.batch_invariance(declared))} == {Verdict.SKIP}
