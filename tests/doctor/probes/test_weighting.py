"""Attention weights reach the values as softmax made them, or the change is named."""

import pytest

from glassformer.doctor.probes.weighting import used_as_they_are
from glassformer.finding import Verdict
from tests.bugs import healthy_traps as traps
from tests.bugs.base import Config
from tests.doctor.probes.subjects import bert, buggy, gpt2, rotary, sound, t5, warmed

SICK = {
    "softmax_twice": "softmax is applied a second time",
    "softmax_twice_rotary": "in layer 1 softmax is applied a second time",
    "softmax_twice_unmasked": "softmax is applied a second time",
    "weights_squared": "in layer 2 the attention weights are raised to the power 2 after softmax; those of a query sum",
    "weights_squared_normed": "raised to the power 2",
    "weights_rooted": "raised to the power 0.5",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("id", SICK)
def test_a_change_after_softmax_is_named_with_its_layer(id):
    finding = used_as_they_are(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert SICK[id] in finding.why
    assert finding.evidence["layer"] == {"softmax_twice_rotary": 1, "weights_squared": 2}.get(id, 0)
    assert finding.remedy
    assert used_as_they_are(sound(id)).passed


@pytest.mark.parametrize("made", [gpt2, rotary, bert, t5])
def test_plain_attention_passes(made):
    assert used_as_they_are(made()).passed


@pytest.mark.parametrize("made", [traps.talking_heads, traps.gated_weights])
def test_what_is_learned_is_not_judged(made):
    assert used_as_they_are(warmed(made())).verdict is not Verdict.FAIL


@pytest.mark.parametrize("attention", [traps.MaskedAfterwards, traps.SoftCap, traps.SlopeTimesKey])
def test_masks_and_factors_change_nothing(attention):
    cfg = Config(position="alibi") if attention is traps.SlopeTimesKey else Config()
    assert used_as_they_are(warmed(traps.changed(cfg, "*.attention", attention))).passed
