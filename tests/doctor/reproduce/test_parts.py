"""Experiments with single parts: each script shows the planted bug and not its sound twin."""

import pytest

from glassformer.doctor.probes import norms, subject_of
from glassformer.doctor.probes.blocks import residual_growth
from glassformer.doctor.probes.structure import initial
from glassformer.doctor.probes.structure.recording import recorded
from glassformer.finding import Finding, Verdict
from tests.bugs.zoo import by_id
from tests.doctor.reproduce.scripts import exit_code, script_for, shows

WARM = {"weights": "matrices x 6"}


def shows_found(id: str, found: list[Finding]) -> bool:
    """Whether the script for the failure among these findings shows the bug and not its twin."""
    (failed,) = [f for f in found if f.verdict is Verdict.FAIL]
    sick, well = script_for(id, failed)
    assert "glassformer" not in sick.text
    return (exit_code(sick), exit_code(well)) == (1, 0)


def examined(id: str):
    return subject_of(by_id(id).build(), kind=by_id(id).kind, expect=dict(by_id(id).expect))


@pytest.mark.parametrize("id", ["norm_over_time", "norm_over_batch", "eps_1e_3", "unbiased_variance", "eps_outside"])
def test_norms(id):
    subject = examined(id)
    assert shows_found(id, [norms.each_token_by_itself(subject), *norms.eps_as_declared(subject)])


@pytest.mark.parametrize("id", ["softmax_over_queries", "softmax_over_heads"])
def test_the_axis_of_softmax(id):
    assert shows(id, "softmax_axis/row-sums")


@pytest.mark.parametrize("id", ["softmax_twice", "softmax_twice_rotary", "weights_squared", "weights_rooted"])
def test_weights_that_are_changed_after_softmax(id):
    assert shows(id, "attention_weights/after-softmax")


def test_sizes_of_the_stream_and_of_initial_matrices():
    assert shows_found("loud_layer", [residual_growth(examined("loud_layer"))])
    for id in ("unscaled_init", "head_three_times"):
        subject = examined(id)
        recording = recorded(subject)
        assert shows_found(id, [*initial.output_projections(subject, recording), initial.head(subject, recording)])


def test_shifted_positions_and_greedy_choices():
    assert shows("rotates_queries_only", "rope_relative/shift-5", offset=5, **WARM)
    assert shows("picks_second_last", "decode_select/plain", prompt=3, use_cache=False, **WARM)
