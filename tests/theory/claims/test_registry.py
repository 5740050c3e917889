"""Reading claims, finding them, running one."""

import subprocess
import sys

import pytest

import glassformer as gf
from glassformer.finding import Verdict
from glassformer.theory.claims import CHAPTERS, TITLES, ClaimError, coverage
from glassformer.theory.claims.registry import close_to, find, load_all


def test_the_public_names():
    assert gf.check is gf.claims.check
    assert gf.claims.ALL is load_all()
    with pytest.raises(AttributeError, match="no attribute 'NONE'"):
        gf.claims.NONE  # noqa: B018


def test_check_gives_a_finding_with_its_parts():
    found = gf.check("rope-relative")
    assert found.verdict is Verdict.PASS
    assert {part["evidence"]["kind"] for part in found.evidence["parts"]} == {"exact", "numerical", "erratum"}
    assert gf.check("rope-relative").to_dict() == found.to_dict()
    assert gf.check("rope-relative", broken=True).verdict is Verdict.FAIL


def test_slow_claims_wait_until_there_is_time():
    found = gf.check("pe-extrapolation", slow=False)
    assert found.verdict is Verdict.SKIP
    assert "--slow" in found.why


def test_an_unknown_claim_or_knob_names_what_there_is():
    with pytest.raises(ClaimError, match="Did you mean rope-relative"):
        gf.check("rope-relativ")
    with pytest.raises(ClaimError, match="has no knob 'heat'; its knobs: temperature"):
        gf.check("softmax-row-stochastic", heat=2.0)
    with pytest.raises(ClaimError, match="its knobs: none"):
        gf.check("rope-relative", heat=2.0)


def test_near_names_are_parts_of_names_too_and_far_ones_name_nothing():
    assert close_to("convex", load_all()) == " Did you mean convex-weights-upper-bound or attention-output-convex-hull?"
    assert close_to("zzzz", load_all()) == ""


def test_chapters_have_titles_and_claims_come_in_their_order():
    assert set(CHAPTERS) == set(TITLES)
    order = [CHAPTERS.index(claim.chapter) for claim in load_all().values()]
    assert order == sorted(order)
    assert next(iter(load_all())) == coverage()[0].items[0]


def test_finding_a_claim_brings_its_check_and_figure():
    claim = find("rope-relative")
    assert callable(claim.check)
    assert callable(claim.figure)


def test_listing_claims_needs_no_torch():
    code = "import glassformer as gf, sys; gf.claims.ALL; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
