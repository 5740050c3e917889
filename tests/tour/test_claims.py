"""The claims of the tour: they hold, their negative controls fail, and both can be wrong."""

import dataclasses

import pytest

from glassformer.tour.claims import CheckedClaim, check_claims


@pytest.fixture(scope="module")
def checked():
    (found,) = check_claims(("rope-relative",))
    return found


def test_a_claim_and_its_control_are_two_findings(checked):
    claim, control = checked.findings
    assert claim.passed
    assert control.passed
    assert checked.control_failures > 0
    assert checked.erratum[0] == "Ch. 13 ex. 8"
    assert "$" not in "".join((checked.title, checked.control, *checked.erratum))


def test_a_claim_that_fails_and_a_control_that_does_not_are_failures(checked):
    failed = dataclasses.replace(checked.outcome, finding=checked.control_outcome.finding)
    idle = dataclasses.replace(checked.control_outcome, finding=checked.outcome.finding)
    claim, control = CheckedClaim(failed, idle).findings
    assert not claim.passed
    assert not control.passed


def test_a_claim_without_an_error_in_its_sources_has_no_erratum(checked):
    claim = dataclasses.replace(checked.outcome.claim, errata=())
    assert CheckedClaim(dataclasses.replace(checked.outcome, claim=claim), checked.control_outcome).erratum is None
