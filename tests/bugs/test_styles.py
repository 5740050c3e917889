"""Bugs written in several styles are named first, and the sound models of each style raise no alarm."""

import pytest
import torch

import glassformer as gf
from tests.bugs.styles.variants import STYLES, VARIANTS

QUICKLY = ("nano-eos_masked", "functional-layer_twice")
INVISIBLE = ("eos_masked", "zero_masked", "several_masked", "padding_labels", "tables_copied")
"""Bugs of the loss, and a copy in place of one tensor: weights and logits are right."""
WRITTEN_FIRST = ("nano", "hugging", "functional", "contracted", "encoder", "pair")
"""Styles whose bugs show in a plain call; the later ones have bugs of caches, padding, modes and losses as well."""


def test_there_are_variants_of_every_missed_bug_in_several_styles():
    for diagnosis in ("attention_weights", "dead_gradient", "layer_reuse", "position_twice", "loss_padding"):
        assert len({v.style for v in VARIANTS if v.diagnosis == diagnosis}) >= 4, diagnosis
    assert len(VARIANTS) >= 75
    assert len({v.id for v in VARIANTS}) == len(VARIANTS)


@pytest.mark.sample(30)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.style in WRITTEN_FIRST], ids=lambda v: v.id)
@torch.no_grad()
def test_a_variant_differs_from_its_sound_twin_in_weights_or_logits(variant):
    module, kind = STYLES[variant.style]
    sick, well = variant.build(), module.build()
    tokens = torch.randint(6, 97, (2, 13), generator=torch.Generator().manual_seed(0))
    call = (tokens[:, :9], tokens) if kind == "seq2seq" else (tokens,)

    def logits(model):
        out = model(*call)
        return getattr(out, "logits", out[0] if isinstance(out, tuple) else out)

    one, two = sick.state_dict(), well.state_dict()
    same = one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    alike = torch.equal(logits(sick), logits(well))
    assert (same and alike) == (variant.bug in INVISIBLE)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "variant",
    [v if v.id in QUICKLY else pytest.param(v, marks=pytest.mark.slow) for v in VARIANTS],
    ids=lambda v: v.id,
)
def test_every_variant_is_named_first(variant):
    report = gf.diagnose(variant.build(), kind=variant.kind)
    assert report.diagnoses, report.text()
    assert report.diagnoses[0].id == variant.diagnosis, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_sound_models_of_every_style_raise_no_alarm(style):
    module, kind = STYLES[style]
    report = gf.diagnose(module.build(), kind=kind)
    assert report.healthy, report.text()
