"""The first attention in which a cached step parts from the full pass tells why."""

import pytest

from glassformer.doctor.probes.step import explain_step
from tests.doctor.probes.subjects import buggy, gpt2, t5


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("id", "cause"),
    [
        ("cache_never_grows", "cache_mismatch"),
        ("position_restarts", "decode_position"),
        ("query_offset_missing", "decode_position"),
        ("alibi_bias_zero", "decode_position"),
        ("mask_top_left", "cache_mask"),
        ("target_position_restarts", "decode_position"),
        ("target_cache_never_grows", "cache_mismatch"),
    ],
)
def test_causes_are_distinguished(id, cause):
    found, words, layer = explain_step(buggy(id), rows=2, sizes=[4, 1, 1, 1], piece=2, warm=6.0, first=5)
    assert found == cause
    assert words
    assert layer == 0


@pytest.mark.parametrize("sizes", [[4, 1, 1, 1], [9, 1, 1, 1]])
def test_the_layer_of_an_encoder_decoder_is_named(sizes):
    """Also if target and source have equally many positions: the two attentions must not be confused."""
    found, _, layer = explain_step(buggy("target_other_layers_values"), rows=2, sizes=sizes, piece=1, warm=6.0, first=4)
    assert (found, layer) == ("cache_mismatch", 2)
    assert explain_step(t5(), rows=2, sizes=sizes, piece=2, warm=6.0, first=5) == (None, "", None)


def test_a_correct_step_has_no_cause():
    assert explain_step(gpt2(), rows=2, sizes=[4, 1, 1], piece=2, warm=6.0, first=5) == (None, "", None)
