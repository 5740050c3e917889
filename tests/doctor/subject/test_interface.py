"""Arguments are recognised by their names, outputs by their form."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from glassformer.doctor.subject.errors import CannotExamineError, Unsupported
from glassformer.doctor.subject.interface import find_cache, find_logits, find_loss, inspect_call
from tests.bugs import healthy_transformers

LOGITS = torch.zeros(2, 5, 7)


class Takes(nn.Module):
    def forward(self, idx, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False, labels=None):
        return idx


def test_common_names_are_found():
    face = inspect_call(Takes())
    assert (face.tokens, face.mask, face.positions) == ("idx", "attention_mask", "position_ids")
    assert (face.cache, face.labels, face.positions_from_caller) == ("past_key_values", "labels", True)


def test_no_argument_name_makes_a_model_one_of_the_library():
    face = inspect_call(Takes())
    assert (face.library, face.shifts_labels) == (False, False)
    typed = Takes()
    typed.config = SimpleNamespace(model_type="gpt2")
    assert not inspect_call(typed).library
    face = inspect_call(healthy_transformers.build(healthy_transformers.DECODERS["gpt2"]))
    assert (face.library, face.shifts_labels) == (True, True)
    wrapped = nn.Module()
    wrapped.inner = healthy_transformers.build(healthy_transformers.DECODERS["gpt2"])
    wrapped.forward = lambda idx, labels=None: idx
    face = inspect_call(wrapped)
    assert (face.library, face.shifts_labels) == (True, False)


def test_a_target_that_may_be_left_out_can_hold_labels():
    def model(idx, target=None, mask=None): ...

    assert inspect_call(model).target_is_optional
    alone = inspect_call(model, single=True)
    assert (alone.is_seq2seq, alone.labels, alone.mask) == (False, "target", "mask")
    assert not inspect_call(lambda src, tgt: src).target_is_optional


def test_a_second_token_argument_is_an_encoder_decoder():
    def model(src, tgt, src_mask=None, tgt_mask=None): ...

    face = inspect_call(model)
    assert face.is_seq2seq
    assert (face.source_mask, face.mask) == ("src_mask", "tgt_mask")
    assert not inspect_call(lambda idx, targets=None: idx).is_seq2seq


def test_a_missing_argument_is_named_in_one_sentence():
    with pytest.raises(CannotExamineError, match="needs the argument 'image'"):
        inspect_call(lambda idx, image: idx)
    with pytest.raises(CannotExamineError, match="takes no arguments"):
        inspect_call(lambda: None)


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (LOGITS, None),
        {"loss": torch.tensor(0.0), "logits": LOGITS},
        SimpleNamespace(logits=LOGITS),
        LOGITS.view(10, 7),
    ],
)
def test_logits_are_found_in_every_usual_form(output):
    assert find_logits(output, (2, 5)).shape == (2, 5, 7)


@pytest.mark.parametrize("output", [None, "text", torch.zeros(3), (), {}, torch.zeros(2, 5, dtype=torch.long)])
def test_other_outputs_are_described_not_guessed(output):
    with pytest.raises(CannotExamineError, match="it returned"):
        find_logits(output, (2, 5))


def test_logits_of_the_last_place_alone_are_a_missing_capability():
    with pytest.raises(Unsupported, match="last position only"):
        find_logits((torch.zeros(2, 1, 7), None), (2, 5))


def test_cache_and_loss_come_with_the_logits():
    cache = object()
    assert find_cache((LOGITS, cache)) is cache
    assert find_cache(SimpleNamespace(past_key_values=cache)) is cache
    assert find_cache(LOGITS) is None
    assert find_loss((LOGITS, torch.tensor(3.0))) == 3
    assert find_loss({"loss": torch.tensor([2.0])}) == 2
    assert find_loss(LOGITS) is None


def test_a_classifier_is_refused_with_what_to_give_instead():
    with pytest.raises(CannotExamineError, match="as a classifier does: give a function or module that returns"):
        find_logits(torch.zeros(2, 3), (2, 5), vocab_size=31)
