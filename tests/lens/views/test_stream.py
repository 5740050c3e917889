"""Views of the stream: numbers that sum to the model's, and pictures of exactly those numbers."""

import numpy as np
import pytest
import torch

from glassformer.lens import rank
from glassformer.lens.sites import LensError
from glassformer.lens.views import KINDS, Choice, Subject
from tests.lens.figures.legible import problems
from tests.variants import decoder, lively, seq2seq

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
OTHER = [3, 1, 4, 1, 5, 9, 8, 6]


def logits_of(subject):
    with torch.no_grad():
        return subject.model(subject.tokens)[0]


@pytest.fixture(scope="module")
def subject():
    return Subject("tiny", lively(decoder())[0], IDS, lambda i: f" t{i}")


def test_the_last_depth_of_the_lens_is_the_model_s_own_answer(subject):
    view = KINDS["logit-lens"](subject, Choice())
    logits = logits_of(subject)
    chances, best = logits.softmax(-1).max(-1)
    assert view.numbers["top"][-1] == [f" t{i}" for i in best.tolist()]
    assert view.numbers["probability"][-1] == pytest.approx(chances.tolist())
    assert view.numbers["divergence"][-1] == pytest.approx([0] * 8, abs=1e-12)
    assert view.numbers["depths"] == ["embedding", "block 0", "block 1"]
    for show in (None, "entropy"):
        assert not problems(KINDS["logit-lens"](subject, Choice(show=show)).draw())


def test_attribution_sums_to_the_logit_and_names_parts_shortly(subject):
    view = KINDS["attribution"](subject, Choice(position=4, answer=7))
    logit = float(logits_of(subject)[4, 7])
    assert view.numbers["logit"] == pytest.approx(logit, abs=1e-10)
    assert sum(view.numbers["parts"].values()) == pytest.approx(logit, abs=1e-10)
    assert view.numbers["finding"]["verdict"] == "pass"
    figure = view.draw()
    names = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert {"embedding", "head 1.3", "feed-forward 0", "sum"} <= names
    assert not problems(figure)


def test_attribution_is_about_the_most_likely_token_at_the_last_position(subject):
    view = KINDS["attribution"](subject, Choice())
    assert view.numbers["position"] == 7
    assert view.numbers["answer"] == f" t{int(logits_of(subject)[-1].argmax())}"
    less = KINDS["attribution"](subject, Choice(answer=7, wrong=9, show="depth"))
    logits = logits_of(subject)[-1]
    assert less.numbers["logit"] == pytest.approx(float(logits[7] - logits[9]), abs=1e-10)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("show", "layer", "shape"),
    [
        ("stream", None, (2, 8)),
        ("heads", None, (2, 6)),
        ("heads", 1, (6, 8)),
        ("attention", None, (2, 8)),
        ("feedforward", 1, (1, 8)),
    ],
)
def test_patching_maps_have_their_shapes_and_can_be_read(subject, show, layer, shape):
    choice = Choice(show=show, layer=layer, against=OTHER, answer=7, wrong=9)
    view = KINDS["patch"](subject, choice)
    assert np.shape(view.numbers["effects"]) == shape
    figure = view.draw()
    assert not problems(figure)
    shown = np.asarray(figure.axes[0].images[0].get_array())
    assert np.array_equal(shown, np.asarray(view.numbers["effects"]))


def test_patching_the_whole_difference_into_layer_0_restores_everything(subject):
    """The texts differ at place 6 alone, so its embedding is all there is to put back."""
    effects = KINDS["patch"](subject, Choice(against=OTHER, answer=7, wrong=9)).numbers["effects"]
    assert effects[0][6] == pytest.approx(1, abs=1e-9)
    assert effects[0][:6] == pytest.approx([0] * 6, abs=1e-9)


def test_patching_needs_a_second_text_and_two_answers(subject):
    with pytest.raises(LensError, match="needs a second text"):
        KINDS["patch"](subject, Choice())
    with pytest.raises(LensError, match="for both texts"):
        KINDS["patch"](subject, Choice(against=subject.ids))
    for kind in ("patch", "attribution"):
        with pytest.raises(LensError, match="--answer and --wrong are the same token"):
            KINDS[kind](subject, Choice(against=OTHER, answer=7, wrong=7))
    with pytest.raises(LensError, match=r"--text has \d+ tokens? and --against has \d+ tokens?: patching"):
        KINDS["patch"](subject, Choice(against=OTHER[:-1], answer=7, wrong=9))


def test_rank_gives_the_stream_s_spectrum_deviation_and_norms(subject):
    view = KINDS["rank"](subject, Choice())
    found = rank.rank_by_depth(subject.model, subject.tokens)
    assert view.numbers["singular_values"] == found.singular_values[:, 0].tolist()
    assert view.numbers["deviation"] == found.deviation[:, 0].tolist()
    for show in ("spectrum", "deviation", "norms"):
        assert not problems(KINDS["rank"](subject, Choice(show=show)).draw())
    norms = KINDS["rank"](subject, Choice(show="norms")).numbers
    assert set(norms) == {"stream", "what attention adds", "what feed-forward adds"}
    with pytest.raises(LensError, match="at least two"):
        KINDS["rank"](Subject("tiny", subject.model, [1]), Choice())


def test_the_variants_of_a_block_are_drawn_with_their_theory(subject):
    view = KINDS["rank"](subject, Choice(show="variants"))
    assert set(view.numbers["deviation"]) == set(rank.VARIANTS)
    assert view.numbers["deviation"]["attention"][3] < 1e-4 < view.numbers["deviation"]["pre-norm-skip-mlp"][50]
    assert len(view.numbers["theory"]) == 3
    assert not problems(view.draw())


@pytest.mark.parametrize("kind", ["logit-lens", "rank", "attribution"])
def test_an_encoder_decoder_is_read_along_its_decoder(kind):
    both = Subject("pair", lively(seq2seq())[0], IDS, str, [3, 7, 8])
    view = KINDS[kind](both, Choice())
    if kind == "logit-lens":
        assert view.numbers["tokens"] == ["3", "7", "8"]
    assert not problems(view.draw())


def test_a_text_longer_than_the_context_is_refused(subject):
    long = Subject("tiny", subject.model, [1] * 30)
    with pytest.raises(LensError, match="30 tokens, more than the context of 29"):
        KINDS["logit-lens"](long, Choice())
