"""Initial sizes of output projections and of the head, in every style."""

import pytest
import torch

from glassformer.doctor.probes import subject_of
from glassformer.doctor.probes.structure import initial
from glassformer.doctor.probes.structure.recording import recorded
from glassformer.finding import Verdict
from tests.bugs.styles import nano
from tests.doctor.probes.structure.cases import SOUND, bugs_of, styled
from tests.doctor.probes.subjects import buggy, failures, sound

UNDECLARED = {"nano": "scaled_init", "hugging": "scale_residual_init", "functional": "residual_init"}


@pytest.mark.parametrize(("style", "bug"), [pair for pair in bugs_of("residual_growth") if pair[1] != "stream_twice"])
def test_output_projections_that_start_too_large_are_found(style, bug):
    assert failures(initial.output_projections(*styled(style, bug))) == ["residual_growth/init"]


@pytest.mark.parametrize("style", UNDECLARED)
def test_a_rule_that_reaches_only_some_projections_is_found_without_a_declaration(style):
    given = {UNDECLARED[style]: None}
    assert failures(initial.output_projections(*styled(style, "unscaled_feed", **given))) == ["residual_growth/init"]
    assert failures(initial.output_projections(*styled(style, "unscaled_init", **given))) == []
    assert failures(initial.output_projections(*styled(style, **given))) == []


@pytest.mark.parametrize(("style", "bug"), bugs_of("init_loss"))
def test_a_head_larger_than_declared_is_found(style, bug):
    assert initial.head(*styled(style, bug)).verdict is Verdict.FAIL


@pytest.mark.sample(3)
@pytest.mark.parametrize("style", SOUND)
def test_sound_models_pass(style):
    assert failures(initial.output_projections(*styled(style))) == []
    assert initial.head(*styled(style)).verdict is not Verdict.FAIL


def test_a_head_of_zeros_and_an_undeclared_size_are_not_reported():
    model = nano.build()
    torch.nn.init.zeros_(model.lm_head.weight)
    subject = subject_of(model, kind="decoder")
    assert initial.head(subject, recorded(subject)).passed
    assert initial.head(*styled("nano", "large_head", init_std=None)).verdict is Verdict.SKIP


def test_trained_weights_are_not_judged():
    model = nano.build("unscaled_init")
    with torch.no_grad():
        model.transformer["h"][0].ln_1.weight.add_(0.1 * torch.randn(48))
    subject = subject_of(model, kind="decoder")
    assert not initial.fresh(model)
    assert failures(initial.output_projections(subject, recorded(subject))) == []


def test_the_planted_bug_and_its_twin():
    for subject, wanted in ((buggy("unscaled_init"), ["residual_growth/init"]), (sound("unscaled_init"), [])):
        assert failures(initial.output_projections(subject, recorded(subject))) == wanted


@pytest.mark.parametrize("rule", ["torch", "lecun", "he"])
def test_sizes_that_go_by_the_width_of_the_input_are_no_rule_for_output_projections(rule):
    """With two layers and a feed-forward of four times the width, 1/√(2L) is also the ratio of the widths."""
    model = nano.build(n_layer=2, scaled_init=None)
    for layer in [module for module in model.modules() if isinstance(module, torch.nn.Linear)]:
        if rule == "torch":
            layer.reset_parameters()
        else:
            torch.nn.init.normal_(layer.weight, std=({"lecun": 1, "he": 2}[rule] / layer.in_features) ** 0.5)
    subject = subject_of(model, kind="decoder")
    assert failures(initial.output_projections(subject, recorded(subject))) == []
