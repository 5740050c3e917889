"""A mask holds however large scores become."""

import pytest

from glassformer.doctor.probes import scores
from glassformer.doctor.subject.adapt import subject_of
from glassformer.doctor.subject.trace import trace_call
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import Copycat, buggy, gpt2, rotary, t5


@pytest.mark.parametrize("make", [gpt2, rotary, t5])
def test_correct_masks_hold(make):
    finding = scores.masks_hold(make())
    assert finding.verdict is Verdict.PASS
    assert finding.measured == 0


@pytest.mark.parametrize("id", ["mask_minus_1e4", "mask_minus_30_one_layer"])
def test_a_constant_that_scores_reach_is_found_with_its_layer(id):
    finding = scores.masks_hold(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert finding.id == "mask_value/large-scores"
    assert finding.evidence["layer"] == (1 if "layer" in id else 0)


def test_a_leak_that_needs_no_large_scores_is_left_to_the_leak():
    assert "already" in scores.masks_hold(buggy("no_causal_mask")).why


@pytest.mark.parametrize("make", [gpt2, rotary])
def test_scores_become_as_large_as_a_mask_has_to_stand(make):
    with make().isolated() as isolated:
        scores.enlarge(isolated)
        trace = trace_call(isolated, isolated.tokens(2, 23, seed=5))
        top = max(float(a.scores[a.scores > -1e30].abs().max()) for a in trace.attentions)
    assert 0.2 * scores.REACH < top < 5 * scores.REACH


def test_without_attention_nothing_is_reported():
    from glassformer.doctor.probes import Unsupported

    with pytest.raises(Unsupported, match="no softmax"):
        scores.masks_hold(subject_of(Copycat()))
    assert scores.masks_hold(subject_of(lambda idx: Copycat(7)(idx), vocab_size=7)).verdict is Verdict.SKIP
