"""Norm placement of models whose blocks are not modules."""

import pytest

from glassformer.doctor.probes.structure import placement
from glassformer.doctor.probes.structure.placement import as_declared, residual_not_normed, stream_added_once
from tests.doctor.probes.structure.cases import styled
from tests.doctor.probes.subjects import failures, listed


@pytest.mark.parametrize("style", ["functional", "contracted"])
def test_post_norm_where_pre_norm_is_declared_is_found(style):
    subject, _ = styled(style, "post_norm")
    assert failures(as_declared(subject)) == ["norm_placement/read"]
    assert listed(as_declared(subject))[0].evidence["layer"] == 0


@pytest.mark.parametrize("style", ["functional", "contracted"])
def test_pre_norm_as_declared_passes_and_post_norm_is_missed_where_it_is_declared(style):
    (finding,) = as_declared(styled(style)[0])
    assert finding.passed
    field = {"functional": {"pre_norm": False}, "contracted": {"norm_placement": "post"}}[style]
    assert failures(as_declared(styled(style, **field)[0])) == ["norm_placement/read"]
    (finding,) = as_declared(styled(style, "post_norm", **field)[0])
    assert finding.passed


def test_blocks_that_are_modules_are_left_to_the_other_probe():
    assert listed(as_declared(styled("nano", "post_norm")[0])) == []


def test_without_a_declaration_nothing_is_judged():
    (finding,) = as_declared(styled("functional", "post_norm", pre_norm=None)[0])
    assert str(finding.verdict) == "skip"


@pytest.mark.parametrize(
    ("style", "bug", "changes"),
    [
        ("contracted", "residual_normed", {"norm_placement": None}),
        ("inline", "residual_normed", {}),
        ("inline", "feed_residual_normed", {}),
        ("time_first", "residual_normed", {}),
    ],
)
def test_a_residual_that_starts_from_the_normed_stream_is_found_without_a_declaration(style, bug, changes):
    (finding,) = residual_not_normed(styled(style, bug, **changes)[0])
    assert (finding.id, str(finding.verdict)) == ("norm_placement/start", "fail")
    assert ("the feed-forward is added" in finding.why) == (bug == "feed_residual_normed")


@pytest.mark.parametrize(
    ("style", "bug"), [("contracted", None), ("contracted", "post_norm"), ("inline", None), ("torch_parts", None)]
)
def test_pre_norm_and_post_norm_layers_are_wired_alike(style, bug):
    (finding,) = residual_not_normed(styled(style, bug)[0])
    assert finding.passed


def test_attention_that_reads_its_tokens_in_another_order_is_not_judged(monkeypatch):
    subject = styled("inline", "feed_residual_normed")[0]
    recording = placement.recorded(subject, exact=True)
    for block in recording.anatomy.blocks:
        q = block.attention.projections["q"]
        q.read = q.read.flip(1)
    monkeypatch.setattr(placement, "recorded", lambda subject, exact: recording)
    assert failures(residual_not_normed(subject)) == []


def test_a_stream_that_enters_a_sum_twice_is_found():
    (finding,) = stream_added_once(styled("functional", "stream_twice")[0])
    assert (finding.id, finding.evidence["layer"]) == ("residual_growth/traced", 0)
    assert finding.measured == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize("style", ["functional", "contracted"])
def test_sums_of_sound_models_pass_and_those_of_watched_blocks_are_left_alone(style):
    (finding,) = stream_added_once(styled(style)[0])
    assert finding.passed
    assert listed(stream_added_once(styled("nano")[0])) == []
