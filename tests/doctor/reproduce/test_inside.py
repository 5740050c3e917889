"""Experiments that read what goes into softmax."""

import pytest

from tests.doctor.reproduce.scripts import shows, shows_in


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("id", "probe", "evidence"),
    [
        ("half_softmax", "low_precision/softmax", {}),
        ("mask_minus_1e4", "mask_value/constant", {}),
        ("mask_minus_1e4", "mask_value/padding", {}),
        ("over_mask_diagonal", "over_mask/pattern", {"query": 22, "key": 22}),
        ("window_off_by_one", "window/count", {"declared": 8}),
    ],
)
def test_the_script_shows_the_bug_and_not_its_twin(id, probe, evidence):
    assert shows(id, probe, **evidence)


@pytest.mark.parametrize("bug", ["residual_normed", "feed_residual_normed"])
def test_a_residual_from_the_normed_stream_shows(bug):
    assert shows_in(bug, "tests.bugs.styles.inline.build", "decoder", "norm_placement/start")
