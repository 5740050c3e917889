"""Any model becomes a Subject; what cannot is refused in one sentence."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import CannotExamineError, subject_of
from tests.bugs.healthy_traps import closure_blocks, nano_style
from tests.doctor.probes.subjects import Copycat, bert, gpt2, sound, t5


def test_our_models_are_recognised_with_their_kinds():
    assert [s().kind for s in (gpt2, bert, t5)] == ["decoder", "encoder", "seq2seq"]
    assert gpt2().vocab_size == 61
    assert gpt2().limit == 80


def test_vocabulary_is_found_in_the_embedding_and_length_by_trial():
    subject = subject_of(Copycat(23))
    assert (subject.vocab_size, subject.limit) == (23, 129)
    assert any("taken for a decoder" in note for note in subject.notes)


def test_a_mask_of_the_other_polarity_is_noticed():
    class Inverted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = sound("mask_ignored").model
            self.config = self.inner.config

        def forward(self, idx, key_padding_mask=None):
            return self.inner(idx, attention_mask=None if key_padding_mask is None else ~key_padding_mask.bool())

    subject = subject_of(Inverted(), kind="decoder")
    assert subject.interface.mask_inverted
    assert subject_of(sound("mask_ignored").model).interface.mask_inverted is False


def test_nanogpt_style_gets_targets_so_that_it_shows_all_places():
    subject = subject_of(nano_style(), kind="decoder")
    assert subject.interface.needs_labels
    assert subject.logits(subject.tokens(2, 6)).shape[:2] == (2, 6)


def test_the_vocabulary_of_a_callable_is_that_of_its_first_logits():
    with pytest.raises(CannotExamineError, match="give vocab_size"):
        subject_of(lambda idx: "text")
    assert subject_of(lambda idx: torch.zeros(*idx.shape, 7)).vocab_size == 7
    assert subject_of(lambda idx: torch.zeros(*idx.shape, 7), vocab_size=7).vocab_size == 7


class Bad(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.table, self.act = nn.Embedding(11, 11), act

    def forward(self, idx):
        return self.act(self.table(idx), idx)


def broken(x, idx):
    raise RuntimeError("Found no NVIDIA driver: CUDA is not available")


def in_place(x, idx):
    idx[:, 0] = 0
    return x + idx[..., None]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda x, idx: None, "it returned None"),
        (lambda x, idx: x[:, -1], "last position only"),
        (broken, "give a CPU copy"),
        (in_place, "changes its input"),
        (lambda x, idx: 1 / 0, "failed on tokens"),
    ],
)
def test_what_cannot_be_examined_is_reported_in_one_sentence(act, words):
    with pytest.raises(CannotExamineError, match=words) as error:
        subject_of(Bad(act))
    assert "\n" not in str(error.value)


def test_things_that_are_no_models_are_refused():
    with pytest.raises(CannotExamineError, match="cannot be called"):
        subject_of(SimpleNamespace())
    with pytest.raises(CannotExamineError, match="is a class"):
        subject_of(Copycat)
    with pytest.raises(CannotExamineError, match="no encoder-decoder"):
        subject_of(Copycat(), kind="seq2seq")


def test_what_a_model_prints_becomes_a_note(capsys):
    def chatty(x, idx):
        print("here")
        return x

    subject = subject_of(Bad(chatty))
    assert any("prints" in note for note in subject.notes)
    assert capsys.readouterr().out == ""


def test_a_model_whose_copy_calls_the_original_is_examined_in_place():
    subject = subject_of(closure_blocks())
    assert subject.in_place
    assert any("examined in place" in note for note in subject.notes)
    with subject.isolated() as isolated:
        assert isolated.model is subject.model
    plain = subject_of(Copycat())
    assert not plain.in_place
    with plain.isolated() as isolated:
        assert isolated.model is not plain.model


def test_an_optional_target_of_a_model_that_answers_alone_holds_labels():
    class Labelled(Copycat):
        def forward(self, idx, target=None):
            return super().forward(idx)

    class Translates(Copycat):
        def forward(self, src, tgt=None):
            return super().forward(tgt) + src.sum()

    assert subject_of(Labelled()).interface.labels == "target"
    assert subject_of(Labelled()).kind == "decoder"
    assert subject_of(Translates()).kind == "seq2seq"
