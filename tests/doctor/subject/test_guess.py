"""Decoder, encoder or both: by declarations, and by what the model computes where they are faint."""

import enum
from types import SimpleNamespace

import pytest

from glassformer.doctor.subject.adapt import subject_of
from tests.bugs.idioms import encoders


@pytest.mark.parametrize("cls", [*encoders.CLEAR, *encoders.FAINT])
def test_an_encoder_is_one(cls):
    assert subject_of(encoders.build(cls)).kind == "encoder"


@pytest.mark.parametrize("cls", encoders.CLEAR)
def test_a_declaration_holds_whatever_the_model_does(cls):
    assert subject_of(encoders.build(cls, causal=True)).kind == "encoder"


@pytest.mark.parametrize("cls", [*encoders.FAINT, encoders.Undeclared])
def test_arguments_of_encoders_make_no_encoder_of_a_causal_model(cls):
    assert subject_of(encoders.build(cls, causal=True)).kind == "decoder"


def test_what_was_only_guessed_is_noted():
    assert any("token_type_ids" in note for note in subject_of(encoders.build(encoders.BySegments)).notes)
    assert any("nothing says otherwise" in note for note in subject_of(encoders.build(encoders.Undeclared)).notes)


class Kind(enum.Enum):
    MASKED = "masked_lm"
    CAUSAL = "causal_lm"


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("arch", "Encoder", "encoder"),
        ("kind", Kind.MASKED, "encoder"),
        ("kind", Kind.CAUSAL, "decoder"),
        ("causal", False, "encoder"),
        ("bidirectional", True, "encoder"),
        ("bidirectional", False, "decoder"),
        ("objective", "autoregressive", "decoder"),
        ("architecture", "encoder-decoder", "decoder"),
    ],
)
def test_fields_of_the_config(field, value, kind):
    model = encoders.build(encoders.Undeclared)
    model.config = SimpleNamespace(vocab_size=encoders.VOCAB, **{field: value})
    assert subject_of(model).kind == kind
