"""What a view is of: words along the stream that is read, and refusals that name the range."""

import pytest

from glassformer.lens.sites import LensError
from glassformer.lens.views.subject import Choice, Subject, index, pick, position_index
from tests.variants import decoder, lively, seq2seq


def test_words_run_along_the_decoder_of_an_encoder_decoder_and_along_the_text_otherwise():
    assert Subject("m", lively(decoder())[0], [3, 4]).words == ["3", "4"]
    both = Subject("m", lively(seq2seq())[0], [3, 4], str, [5, 6, 7])
    assert both.words == ["5", "6", "7"]
    assert both.given["target"].tolist() == [[5, 6, 7]]


def test_the_first_picture_is_the_usual_one_and_an_unknown_one_lists_them():
    assert pick("rank", Choice(), "spectrum", "norms") == "spectrum"
    assert pick("rank", Choice(show="norms"), "spectrum", "norms") == "norms"
    with pytest.raises(LensError, match="rank cannot show 'x': it has spectrum or norms"):
        pick("rank", Choice(show="x"), "spectrum", "norms")


def test_layers_heads_and_positions_outside_are_refused_with_their_range():
    assert index("layer", 1, 2) == 1
    assert index("layer", None, 2) is None
    for bad in (2, -1):
        with pytest.raises(LensError, match=f"layer {bad} does not exist in this model: its layers are 0 to 1"):
            index("layer", bad, 2)
    subject = Subject("m", lively(decoder())[0], [3, 4, 5])
    assert position_index(subject, -1) == 2
    with pytest.raises(LensError, match="use -3 to 2"):
        position_index(subject, 3)
