"""What a model refuses, one sentence each, before anything is computed."""

import pytest
import torch

from glassformer import config as c
from glassformer.model import build
from glassformer.model.inputs import check_inputs
from tests.variants import decoder, tokens

MODEL = build(decoder(position=c.Learned(), max_len=16))


def check(*inputs):
    """The check alone: through a model, the tests' own shape checker would refuse first."""
    check_inputs(MODEL.embed, MODEL.decoder, *inputs)


MISTAKES = {
    "no batch dimension": (lambda: check(torch.tensor([1, 2])), "pass \\(batch, length\\)"),
    "fractions": (lambda: check(torch.rand(1, 3)), "tokens are of dtype torch.float32: pass a tensor of whole numbers"),
    "yes and no": (lambda: check(torch.ones(1, 3).bool()), "tokens are of dtype torch.bool"),
    "lists": (lambda: check([[1, 2]]), r"tokens are of type list: pass .* such as torch.tensor\(\[\[1, 2\]\]\)"),
    "a text": (lambda: check("hello"), "tokens are of type str"),
    "an empty sequence": (lambda: MODEL(torch.zeros(1, 0, dtype=torch.long)), "neither of them 0"),
    "a mask of numbers": (lambda: check(tokens(1, 3), torch.ones(1, 3)), "it must be boolean"),
    "a mask of another shape": (lambda: check(tokens(1, 3), torch.ones(1, 4).bool()), "does not fit tokens"),
    "an unknown token": (lambda: MODEL(torch.tensor([[10**6]])), "token id 1000000 is outside the vocabulary"),
    "segments": (lambda: MODEL(tokens(1, 3), segments=torch.zeros(1, 3).long()), "without segment embeddings"),
    "too long": (lambda: MODEL(tokens(1, 17)), "position 16 is outside a learned table of 16"),
    "a large position": (lambda: MODEL(tokens(1, 1), positions=torch.tensor([[16]])), "position 16 is outside"),
    "a negative position": (lambda: MODEL(tokens(1, 1), positions=torch.tensor([[-1]])), "position -1 is outside"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_refused_with_its_rule(mistake):
    call, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_refused_call_leaves_the_cache_as_it_was():
    cache = MODEL.new_cache()
    MODEL(tokens(1, 15), cache=cache)
    with pytest.raises(ValueError, match="position 16"):
        MODEL(tokens(1, 2), cache=cache)
    assert len(cache) == 15
    MODEL(tokens(1, 1), cache=cache)


def test_padding_takes_no_position():
    """Sixteen real tokens fit a table of sixteen, whatever the padding."""
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[:, :4] = False
    assert MODEL(tokens(1, 20), mask=mask).shape[1] == 20


def test_counted_positions_are_checked_without_reading_a_tensor(monkeypatch):
    """A device would be waited for at every token, and a CUDA graph could not be captured."""
    cache = MODEL.new_cache()
    MODEL(tokens(1, 3), cache=cache)
    monkeypatch.setattr(type(cache), "next_position", lambda self: pytest.fail("a position was read"))
    MODEL(tokens(1, 2), cache=cache)
