"""Norm placement of models whose blocks are not modules."""

import pytest

from glassformer.doctor.probes.structure.placement import as_declared, stream_added_once
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


def test_a_stream_that_enters_a_sum_twice_is_found():
    (finding,) = stream_added_once(styled("functional", "stream_twice")[0])
    assert (finding.id, finding.evidence["layer"]) == ("residual_growth/traced", 0)
    assert finding.measured == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize("style", ["functional", "contracted"])
def test_sums_of_sound_models_pass_and_those_of_watched_blocks_are_left_alone(style):
    (finding,) = stream_added_once(styled(style)[0])
    assert finding.passed
    assert listed(stream_added_once(styled("nano")[0])) == []
