"""Logits that ignore the tokens are a diagnosis; a head of zeros is refused."""

import pytest
import torch

import glassformer as gf
from glassformer.doctor.probes import CannotExamineError, subject_of
from glassformer.doctor.probes.structure.constant import constant_logits
from tests.bugs.styles import functional, hugging, nano
from tests.doctor.probes.subjects import gpt2


@pytest.mark.parametrize("model", [nano.build("constant_logits"), hugging.build("constant_logits")])
def test_a_module_with_constant_logits_is_diagnosed(model):
    report = gf.diagnose(model, kind="decoder")
    assert [d.id for d in report.diagnoses] == ["constant_logits"]
    assert not report.healthy
    assert "not made" in report.notes[0]


@pytest.mark.parametrize(("call", "words"), [(functional.constant, "every position"), (functional.positional, "only")])
def test_a_callable_with_constant_logits_is_diagnosed(call, words):
    report = gf.diagnose(call, vocab_size=97)
    assert report.diagnoses[0].id == "constant_logits"
    assert words in report.diagnoses[0].evidence[0].why


def test_a_head_of_zeros_is_refused_with_its_name():
    model = nano.build()
    torch.nn.init.zeros_(model.lm_head.weight)
    with pytest.raises(CannotExamineError, match=r"lm_head\.weight is all zero"):
        constant_logits(subject_of(model, kind="decoder"))


def test_a_sound_model_passes():
    assert constant_logits(gpt2()) is None
