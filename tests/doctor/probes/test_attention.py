"""Scale, axis, masks and windows are read from the trace, with their layer."""

from dataclasses import replace

import pytest
import torch

from glassformer.doctor.probes import attention
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, bert, buggy, gpt2, names, rotary, t5


def everything(subject):
    seen = attention.traced(subject)
    yield attention.scale(subject, seen)
    yield attention.softmax_axis(subject, seen)
    yield from attention.masks(subject, attention.traced(subject, length=subject.lengths()[-1]))


@pytest.mark.parametrize("make", [gpt2, rotary, bert, t5])
def test_correct_models_pass_all_of_it(make):
    findings = list(everything(make()))
    assert all(f.verdict is Verdict.PASS for f in findings), [f.text() for f in findings]


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "id",
    ["scale_missing", "scale_d_model", "scale_heads_one_layer", "scale_fused", "softmax_over_heads",
     "softmax_over_queries", "mask_minus_1e4",
     "mask_minus_30_one_layer", "over_mask_diagonal",
     "over_mask_far_keys", "over_mask_first_token", "over_mask_causal_encoder", "over_mask_square_cross",
     "window_off_by_one", "window_one_short", "window_missing_in_one_layer"],
)  # fmt: skip
def test_each_planted_fault_is_named_with_its_layer(id):
    bug = BUGS[id]
    failed = [f for f in everything(buggy(id)) if f.verdict is Verdict.FAIL]
    mine = [f for f in failed if f.id.split("/")[0] == bug.diagnosis]
    assert mine, [f.text() for f in failed]
    if bug.layer is not None:
        assert mine[0].evidence["layer"] == bug.layer


def test_the_scale_found_is_called_by_its_name():
    subject = buggy("scale_d_model")
    assert "1/√d_model" in attention.scale(subject, attention.traced(subject)).why


def test_open_layers_are_those_without_a_mask():
    assert attention.open_layers(attention.traced(buggy("leak_one_layer"))) == [1]
    assert attention.open_layers(attention.traced(gpt2())) == []
    assert attention.open_layers(attention.traced(buggy("mask_minus_1e4"))) == []


def test_without_attention_nothing_is_asserted():
    assert attention.scale(gpt2(), []).verdict is Verdict.SKIP
    assert names(attention.masks(gpt2(), [])) == set()


@pytest.mark.parametrize(
    ("back", "ahead", "fits"), [(7, 8, True), (8, 7, True), (8, 8, True), (15, 15, True), (5, 8, False)]
)
def test_an_encoders_window_may_be_counted_in_several_ways(back, ahead, fits):
    i, j = torch.arange(24)[:, None], torch.arange(24)[None]
    visible = (i - j <= back) & (j - i <= ahead)
    scores = torch.zeros(1, 1, 24, 24).masked_fill(~visible, -torch.inf)
    one = replace(attention.traced(bert())[0], scores=scores, allowed=torch.ones(24, 24, dtype=torch.bool))
    assert torch.equal(attention._two_sided(one, 16).allowed, visible) == fits


def test_the_least_number_of_float16_is_a_mask():
    one = attention.traced(gpt2())[0]
    future = ~one.allowed.expand_as(one.scores)
    scores = one.scores.masked_fill(future, -65504.0)
    assert attention.mask_constant([replace(one, scores=scores)]).verdict is Verdict.FAIL
    assert attention.mask_constant([replace(one, scores=scores, weights=torch.float16)]).passed
    weak = one.scores.masked_fill(future, -1e4)
    assert attention.mask_constant([replace(one, scores=weak, weights=torch.float16)]).verdict is Verdict.FAIL


def test_an_attention_outside_of_every_layer_has_no_number():
    seen = [attention.Seen(None, torch.zeros(1), "blocks", layer, "self", torch.ones(1)) for layer in (2, None)]
    assert [one.location for one in seen] == ["layer 2", "one of its attentions"]
