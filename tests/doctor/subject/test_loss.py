"""How a model is asked for its loss, and which shifts are right there."""

import pytest
import torch
from torch import nn

from glassformer.doctor.probes import subject_of
from glassformer.doctor.subject.errors import Unsupported
from glassformer.doctor.subject.loss import loss_call
from tests.bugs.styles import inline, translator


def test_a_method_that_needs_no_labels_shifts_by_itself():
    subject = subject_of(inline.build(), kind="decoder")
    call = loss_call(subject)
    assert (call.method, call.labels, call.mask, call.accepted) == (True, "labels", "attention_mask", (1,))
    tokens = subject.tokens(2, 9)
    with subject.isolated() as isolated:
        loss, logits = call(isolated, tokens)
        same, _ = call(isolated, tokens, tokens, torch.ones_like(tokens))
    assert logits is None
    assert torch.equal(loss, same)


def test_an_encoder_decoder_is_given_its_source():
    subject = subject_of(translator.build(), kind="seq2seq")
    call = loss_call(subject)
    assert (call.labels, call.mask) == (None, "tgt_mask")
    with subject.isolated() as isolated:
        assert call(isolated, isolated.tokens(2, 7))[0].dim() == 0
        with pytest.raises(Unsupported):
            call(isolated, isolated.tokens(2, 7), isolated.tokens(2, 7))


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(31, 31)

    def forward(self, idx, labels=None):
        logits = self.table(idx)
        return logits if labels is None else (logits, nn.functional.cross_entropy(logits.mT, labels))


class LikeTransformers(Labelled):
    def forward(self, input_ids, labels=None):
        return super().forward(input_ids, labels)


def test_who_shifts_labels_of_forward_is_declared_by_the_interface_of_transformers_alone():
    assert loss_call(subject_of(Labelled(), kind="decoder")).accepted == (0, 1)
    assert loss_call(subject_of(LikeTransformers(), kind="decoder")).accepted == (1,)
    assert loss_call(subject_of(nn.Embedding(31, 31), kind="decoder")) is None
