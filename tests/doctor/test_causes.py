"""Failures are sorted into causes and consequences by the table."""

from glassformer.doctor.causes import BRINGS, RANK, sort_out
from glassformer.doctor.report import TITLES
from glassformer.finding import Finding, Verdict
from tests.bugs.bug import TAXONOMY


def fail(id, **evidence):
    return Finding(id, Verdict.FAIL, 1.0, 0.0, "", "", evidence)


def first(*findings):
    return [group[0].id.split("/")[0] for group, _ in sort_out(list(findings))]


def test_every_diagnosis_of_the_taxonomy_has_a_rank_and_a_title():
    assert set(RANK) == set(TAXONOMY) == set(TITLES)
    assert len(RANK) == len(set(RANK))
    assert {name.split("/")[0] for name in BRINGS} <= set(RANK)


def test_a_cause_takes_its_consequences_with_it():
    leak, cache, loss = fail("causal_leak/future-token"), fail("cache_mismatch/steps"), fail("weight_tying/same")
    ((group, explained), (other, _)) = sort_out([leak, cache, loss])
    assert (group, explained) == ([leak], [cache])
    assert other == [loss]


def test_the_cause_of_a_leak_goes_before_the_leak():
    assert first(fail("causal_leak/future-token"), fail("norm_axis/tokens", over="time")) == ["norm_axis"]
    assert first(fail("causal_leak/future-token"), fail("softmax_axis/row-sums")) == ["softmax_axis"]
    assert first(fail("batch_variance/neighbour"), fail("norm_axis/tokens", over="batch")) == ["norm_axis"]


def test_a_weak_mask_explains_a_leak_only_where_no_layer_is_open():
    leak = fail("causal_leak/future-token")
    assert first(leak, fail("mask_value/constant", open=[])) == ["mask_value"]
    assert "causal_leak" in first(leak, fail("mask_value/constant", open=[1]))


def test_a_leak_in_training_explains_train_against_eval_and_nothing_of_inference():
    leak = fail("causal_leak/train-mode")
    assert first(leak, fail("position_train_infer/modes")) == ["causal_leak"]
    assert first(leak, fail("cache_mismatch/steps")) == ["causal_leak", "cache_mismatch"]


def test_nothing_failed_is_no_cause():
    assert sort_out([Finding("a/b", Verdict.PASS)]) == []


def test_unusual_initial_sizes_are_named_after_whatever_computes_something_wrong():
    size, cache = fail("residual_growth/init"), fail("cache_mismatch/steps")
    assert first(size, cache) == ["cache_mismatch", "residual_growth"]
    assert first(fail("residual_growth/sum"), cache) == ["residual_growth", "cache_mismatch"]
