"""What only a trusted model shows."""

import pytest
import torch

import glassformer as gf
from glassformer.doctor.reference import against_reference
from glassformer.finding import Verdict
from tests.bugs.styles import nano
from tests.bugs.styles.variants import STYLES
from tests.doctor.probes.subjects import BUGS, buggy, sound, warmed

COMPARED = [bug.id for bug in BUGS.values() if bug.reference is not None]


@pytest.mark.parametrize("id", COMPARED)
def test_differences_in_convention_are_named(id):
    bug = BUGS[id]
    (finding,) = against_reference(buggy(id), warmed(bug.reference(), kind=bug.kind))
    assert finding.verdict is Verdict.FAIL
    assert finding.id.split("/")[0] in (bug.diagnosis, *bug.also)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("id", "layer"),
    [
        ("leak_one_layer", 1),
        ("window_off_by_one", 0),
        ("over_mask_diagonal", 0),
        ("scale_missing", 0),
        ("values_turned_one_layer", 2),
    ],
)
def test_a_healthy_model_as_reference_names_the_bug_and_its_layer(id, layer):
    bug = BUGS[id]
    (finding,) = against_reference(buggy(id), warmed(bug.healthy(), kind=bug.kind))
    assert (finding.id, finding.evidence["layer"]) == (f"{bug.diagnosis}/reference", layer)
    assert "the reference" in finding.why


def test_a_reference_with_other_weights_is_not_called_a_bug():
    bug = BUGS[COMPARED[0]]
    model, other = bug.healthy(), bug.healthy()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.01)
    other.extra = torch.nn.Parameter(torch.zeros(1))  # other names, so its own weights are kept
    (finding,) = against_reference(warmed(model, kind=bug.kind), warmed(other, kind=bug.kind))
    assert finding.verdict is Verdict.SKIP
    assert "other weights" in finding.why


def test_the_same_model_agrees_with_itself():
    id = COMPARED[0]
    (finding,) = against_reference(sound(id), sound(id))
    assert finding.verdict is Verdict.PASS
    assert list(against_reference(sound(id), None)) == []


STYLED = (
    *(("nano", bug) for bug in ("softmax_twice", "values_from_keys", "position_twice", "layer_twice", "half_softmax")),
    *(("hugging", bug) for bug in ("last_layer_skipped", "half_softmax", "post_norm")),
    *(("functional", bug) for bug in ("position_twice", "one_layer_everywhere", "weights_squared")),
    *(("contracted", bug) for bug in ("position_in_first_layer", "one_layer_everywhere", "softmax_twice")),
)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("style", "bug"), STYLED)
def test_what_differs_first_is_named_in_every_style(style, bug):
    module, kind = STYLES[style]
    (finding,) = against_reference(warmed(module.build(bug), kind=kind), warmed(module.build(), kind=kind))
    assert finding.id == f"{module.BUGS[bug]}/reference"
    assert finding.evidence["first_difference"]


def test_another_gelu_is_named_on_learned_positions_and_before_what_else_fails():
    model = nano.build("unscaled_init")
    for block in model.transformer["h"]:
        block.mlp["act"] = torch.nn.GELU(approximate="tanh")
    report = gf.diagnose(model, kind="decoder", reference=nano.build())
    assert [d.id for d in report.diagnoses] == ["activation", "residual_growth"]
    assert "tanh GELU" in report.diagnoses[0].evidence[0].why
