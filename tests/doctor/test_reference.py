"""What only a trusted model shows."""

import pytest

from glassformer.doctor.reference import against_reference
from glassformer.finding import Verdict
from tests.doctor.probes.patients import BUGS, sick, sound, warmed

COMPARED = [bug.id for bug in BUGS.values() if bug.reference is not None]


@pytest.mark.parametrize("id", COMPARED)
def test_differences_in_convention_are_named(id):
    bug = BUGS[id]
    (finding,) = against_reference(sick(id), warmed(bug.reference(), kind=bug.kind))
    assert finding.verdict is Verdict.FAIL
    assert finding.id.split("/")[0] in (bug.diagnosis, *bug.also)


def test_the_same_model_agrees_with_itself():
    id = COMPARED[0]
    (finding,) = against_reference(sound(id), sound(id))
    assert finding.verdict is Verdict.PASS
    assert list(against_reference(sound(id), None)) == []
