"""What only a trusted model shows."""

import pytest
import torch

from glassformer.doctor.reference import against_reference
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, buggy, sound, warmed

COMPARED = [bug.id for bug in BUGS.values() if bug.reference is not None]


@pytest.mark.parametrize("id", COMPARED)
def test_differences_in_convention_are_named(id):
    bug = BUGS[id]
    (finding,) = against_reference(buggy(id), warmed(bug.reference(), kind=bug.kind))
    assert finding.verdict is Verdict.FAIL
    assert finding.id.split("/")[0] in (bug.diagnosis, *bug.also)


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
