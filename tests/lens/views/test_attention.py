"""Views of attention give the traced numbers, the right maps, and refuse what a model has not."""

import pytest
import torch

from glassformer import config as c
from glassformer.lens.heads import head_table
from glassformer.lens.sites import LensError
from glassformer.lens.trace import trace
from glassformer.lens.views import KINDS, Choice, Subject
from glassformer.model import build
from tests.lens.figures.legible import problems
from tests.variants import decoder, lively, seq2seq

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def subject():
    return Subject("tiny", lively(decoder())[0], IDS)


def test_the_sheet_holds_every_pattern_of_the_trace(subject):
    view = KINDS["attention"](subject, Choice())
    traced = trace(subject.model, subject.tokens, sites="blocks.*.attention.pattern").stack(
        "blocks.*.attention.pattern"
    )
    assert view.numbers["pattern"] == traced[:, 0].tolist()
    figure = view.draw()
    assert "all 12 heads" in figure.title
    assert not problems(figure)


def test_one_head_is_that_head(subject):
    view = KINDS["attention"](subject, Choice(layer=1, head=4))
    traced = trace(subject.model, subject.tokens, sites="blocks.1.attention.pattern")["blocks.1.attention.pattern"]
    assert view.numbers["pattern"] == [[traced[0, 4].tolist()]]
    shown = torch.tensor(view.draw().axes[0].images[0].get_array())
    assert torch.equal(shown, traced[0, 4])


def test_one_layer_is_a_block_of_maps(subject):
    figure = KINDS["attention"](subject, Choice(layer=1)).draw()
    assert "heads of layer 1" in figure.title
    assert len(figure.axes[0].texts) == 6


def test_a_head_without_its_layer_is_refused(subject):
    with pytest.raises(LensError, match="exists in every layer"):
        KINDS["attention"](subject, Choice(head=1))
    with pytest.raises(LensError, match="its heads are 0 to 5"):
        KINDS["attention"](subject, Choice(layer=0, head=6))
    with pytest.raises(LensError, match="cross attention exists only in an encoder-decoder"):
        KINDS["attention"](subject, Choice(show="cross"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("show", "shape"), [(None, (3, 8)), ("cross", (3, 8)), ("encoder", (8, 8)), ("decoder", (3, 3))]
)
def test_an_encoder_decoder_has_three_kinds_of_attention(show, shape):
    both = Subject("pair", lively(seq2seq())[0], IDS, str, [3, 7, 8])
    view = KINDS["attention"](both, Choice(show=show, layer=0, head=2))
    assert tuple(view.numbers["shape"][2:]) == shape
    assert (len(view.numbers["queries"]), len(view.numbers["keys"])) == shape
    assert not problems(view.draw())


def test_scores_of_heads_are_the_table_s(subject):
    view = KINDS["heads"](subject, Choice())
    assert view.numbers == head_table(subject.model, subject.tokens).to_dict()
    titles = [ax.get_title() for ax in view.draw().axes if ax.get_title()]
    assert titles == ["induction", "previous token", "duplicate token", "first token", "relative entropy", "copying"]
    with pytest.raises(LensError, match="induction"):
        KINDS["heads"](subject, Choice(show="inductoin"))
    with pytest.raises(LensError, match=r"'zzzz' is not a score\. Scores: .*induction"):
        KINDS["heads"](subject, Choice(show="zzzz"))


def test_an_encoder_has_no_induction_and_its_score_is_left_out_of_the_picture():
    config = decoder()
    encoder = c.EncoderConfig(
        **{k: getattr(config, k) for k in ("vocab_size", "d_model", "n_layers", "attention", "feedforward", "max_len")}
    )
    subject = Subject("bert", build(encoder), IDS)
    with pytest.raises(LensError, match="bert is not a decoder"):
        KINDS["induction"](subject, Choice())
    figure = KINDS["heads"](subject, Choice()).draw()
    assert figure.axes[0].texts[0].get_text().startswith("undefined")


def test_induction_chooses_the_best_head_and_draws_its_stripe(subject):
    plain = Subject("tiny", subject.model)
    view = KINDS["induction"](plain, Choice())
    scores = head_table(subject.model, weights=False).score("induction")
    assert view.numbers["score"] == float(scores.max())
    assert scores[view.numbers["layer"], view.numbers["head"]] == scores.max()
    assert len(set(view.numbers["tokens"])) < len(view.numbers["tokens"])  # something repeats
    assert not problems(view.draw())
    chosen = KINDS["induction"](plain, Choice(layer=0, head=1)).numbers
    assert (chosen["layer"], chosen["head"]) == (0, 1)


def test_a_text_without_a_repetition_is_refused(subject):
    with pytest.raises(LensError, match="no token of the text occurs twice"):
        KINDS["induction"](Subject("tiny", subject.model, [1, 2, 3]), Choice())
