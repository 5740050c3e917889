"""A cache changes nothing but the cost; what breaks is distinguished."""

import pytest
import torch

from glassformer.doctor.probes import caching, subject_of
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, Copycat, buggy, failures, listed, rotary, t5, warmed


def everything(subject):
    yield from caching.cache_equals_recomputation(subject)
    yield caching.rollback(subject)
    yield from caching.reorder(subject)


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [rotary, t5])
def test_correct_caches_agree_with_recomputation(make):
    findings = list(everything(make()))
    assert all(f.verdict is Verdict.PASS for f in findings), [f.text() for f in findings]
    assert {f.id for f in findings} >= {"cache_mask/prompt", "cache_mismatch/steps", "cache_mask/chunks"}


FAULTS = ("cache_never_grows", "position_restarts", "query_offset_missing", "alibi_bias_zero",
          "no_mask_with_cache", "mask_top_left", "chunk_sees_itself", "window_ignored_when_cached")  # fmt: skip
MORE = ("cache_keeps_64", "cache_first_row", "cache_half_precision", "rope_off_by_one_when_cached",
        "mask_offset_ends_at_64", "window_of_the_chunk")  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("id", [*FAULTS, *(pytest.param(id, marks=pytest.mark.slow) for id in MORE)])
def test_each_fault_of_a_cache_has_its_own_name(id):
    bug = BUGS[id]
    found = failures(caching.cache_equals_recomputation(buggy(id)))
    assert found[0].split("/")[0] in (bug.diagnosis, *bug.also)


@pytest.mark.parametrize("id", ["crop_keeps_position", "crop_resets", "crop_one_too_few"])
def test_a_crop_that_remembers_is_found(id):
    assert failures(caching.rollback(buggy(id))) == ["cache_rollback/crop"]


def test_a_cache_that_only_crops_wrongly_is_right_until_then():
    assert failures(caching.cache_equals_recomputation(buggy("crop_resets"))) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("id", ["reorder_does_nothing", "reorder_skips_a_layer", "reorder_leaves_padding"])
def test_a_reorder_that_leaves_something_behind_is_found(id):
    assert set(failures(caching.reorder(buggy(id)))) <= {"cache_reorder/rows", "cache_reorder/padded"}
    assert failures(caching.reorder(buggy(id)))


class Crashes(Copycat):
    """A cached call stops, because what was kept has another size."""

    def answer(self, idx, cache, kept):
        logits = super().forward(idx)
        return logits if cache is None else logits + kept(cache), [torch.zeros(len(idx), 3, 5)]


class PastKeyValues(Crashes):
    def forward(self, idx, past_key_values=None):
        return self.answer(idx, past_key_values, lambda cache: cache[0])


class KvCache(Crashes):
    def forward(self, idx, kv_cache=None):
        return self.answer(idx, kv_cache, lambda cache: cache[0])


class HiddenStates(Crashes):
    """It takes a cache that the caller has to make, and returns something else next to the logits."""

    def forward(self, idx, kv_cache=None):
        logits, _ = self.answer(idx, kv_cache, lambda cache: cache)
        return logits, torch.zeros(*idx.shape, 5)


@pytest.mark.parametrize("made", [PastKeyValues, KvCache])
def test_a_cached_call_that_stops_is_a_failure_whatever_the_argument_is_called(made):
    assert failures(caching.cache_equals_recomputation(warmed(made()))) == ["cache_mismatch/steps"]


def test_what_is_not_known_to_be_a_cache_is_not_judged():
    with pytest.raises(RuntimeError, match="must match"):  # which an examination reports as skipped
        listed(caching.cache_equals_recomputation(warmed(HiddenStates())))


def test_without_a_cache_nothing_is_asserted():
    findings = listed(everything(subject_of(Copycat())))
    assert {f.verdict for f in findings} == {Verdict.SKIP}
