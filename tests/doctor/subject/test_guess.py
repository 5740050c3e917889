"""Decoder, encoder or both: by declarations, and by what the model computes where they are faint."""

import enum
from types import SimpleNamespace

import pytest
import torch

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


@pytest.mark.parametrize("name", encoders.SPELLINGS)
def test_a_class_name_yields_to_what_the_model_computes(name):
    cls = encoders.called(name, encoders.Undeclared)
    assert subject_of(encoders.build(cls)).kind == "encoder"
    causal = subject_of(encoders.build(cls, causal=True))
    assert causal.kind == "decoder"
    assert any(name in note for note in causal.notes)


@pytest.mark.parametrize("cls", encoders.TWO_HINTS)
def test_two_hints_that_agree_make_an_encoder(cls):
    for causal in (False, True):
        assert subject_of(encoders.build(cls, causal)).kind == "encoder"


@pytest.mark.parametrize("name", ["TinyBert", "EncMLM", "BidirectionalEncoder"])
def test_a_class_name_that_says_the_objective_is_a_declaration(name):
    assert subject_of(encoders.build(encoders.called(name, encoders.Undeclared), causal=True)).kind == "encoder"


def test_a_decoder_called_encoder_may_have_a_mask_that_is_off_by_one():
    class Enc(encoders.Undeclared):
        def run(self, x, hidden):
            t = x.shape[1]
            y = self.words(x) + self.spots(torch.arange(t))
            return self.out(self.layers(y, mask=torch.ones(t, t, dtype=torch.bool).triu(2)))

    assert subject_of(encoders.build(Enc)).kind == "decoder"


def test_an_encoder_with_windows_stays_one():
    class Enc(encoders.Undeclared):
        def run(self, x, hidden):
            t = x.shape[1]
            far = (torch.arange(t)[:, None] - torch.arange(t)).abs() > 3
            return self.out(self.layers(self.words(x) + self.spots(torch.arange(t)), mask=far))

    assert subject_of(encoders.build(Enc)).kind == "encoder"


def test_a_model_with_a_loop_of_its_own_decodes_whatever_its_name():
    class Encoder(encoders.Undeclared):
        def generate(self, x):
            return x

    assert subject_of(encoders.build(Encoder)).kind == "decoder"


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
