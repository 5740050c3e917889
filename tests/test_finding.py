import dataclasses
import json

import pytest

from glassformer.finding import Finding, Verdict
from tests.pages.hostile import HOSTILE, assert_escaped, assert_static_fragment


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [(0.5, "pass"), (1.0, "pass"), (1.5, "fail"), (float("nan"), "fail"), (float("-inf"), "fail")],
)
def test_a_pass_is_finite_and_within_its_bound(measured, verdict):
    assert Finding.judge("x", measured, 1.0, "because").verdict == verdict


def test_a_skip_is_not_a_pass():
    finding = Finding.skip("x", "no weights here", "download them")
    assert finding.verdict is Verdict.SKIP
    assert not finding.passed
    assert "no weights here" in finding.text()
    assert "remedy: download them" in finding.text()


def test_text_shows_number_bound_and_reason_and_a_remedy_only_when_needed():
    good = Finding.judge("cache", 1e-12, 1e-10, "rounding", "fix it")
    assert good.text() == "pass  cache  1e-12 <= 1e-10  (rounding)"
    bad = Finding.judge("cache", 1e-3, 1e-10, "rounding", "fix it")
    assert bad.text() == "fail  cache  0.001 > 1e-10  (rounding)\n      remedy: fix it"
    assert "nan is not <= 1" in Finding.judge("x", float("nan"), 1.0, "").text()


def test_json_form_is_json_even_for_nan():
    text = json.dumps(Finding.judge("x", float("nan"), 1.0, "why", rows=[1, 2]).to_dict(), allow_nan=False)
    back = json.loads(text)
    assert back["measured"] == "nan"
    assert back["verdict"] == "fail"
    assert back["evidence"] == {"rows": [1, 2]}


def shown(finding):
    return "".join(assert_static_fragment(finding._repr_html_(), 50_000).text)


def test_the_display_has_verdict_numbers_reason_fix_and_evidence():
    text = shown(Finding.judge("cache", 1e-3, 1e-10, "rounding", "reset it", rows=[1, 2], long="x" * 900))
    assert "✗ fail cache: 0.001 > 1e-10" in text
    assert "Fix. reset it" in text
    assert "[1, 2]" in text
    assert "x" * 300 not in text
    assert "x" * 200 in text
    assert "Fix." not in shown(Finding.judge("cache", 0.0, 1e-10, "rounding", "reset it"))
    assert "– skip x" in shown(Finding.skip("x", "no weights here"))


def test_the_display_of_a_claim_has_a_table_of_its_evidence():
    parts = [Finding.judge("one", float("nan"), 1.0, "because").to_dict(), Finding.judge("two", 0.5, 1, "so").to_dict()]
    finding = Finding("claim", Verdict.FAIL, evidence={"badge": "proved", "parts": parts})
    text = shown(finding)
    assert "nan is not <= 1" in text
    assert "0.5 <= 1" in text
    assert "2 pieces of evidence" in text
    assert "proved" not in text  # a claim that failed is not proved
    assert "2 pieces of evidence: proved" in shown(dataclasses.replace(finding, verdict=Verdict.PASS))


def test_hostile_text_is_shown_as_text():
    def display(word):
        part = Finding.judge(word, 1.0, 0.0, word).to_dict()
        return (
            Finding.judge(word, 1.0, 0.0, word, word, **{word: word})._repr_html_()
            + Finding.judge(word, 1.0, 0.0, word, word, parts=[part])._repr_html_()
        )

    assert_escaped(display(HOSTILE), display("word"))


def test_a_failure_that_no_limit_explains_had_to_be_equal():
    assert Finding("scale/ratio", Verdict.FAIL, 0.5, 1.0).numbers() == "0.5, not 1"
    assert Finding("scale/ratio", Verdict.FAIL, 2.0, 1.0).numbers() == "2 > 1"
    assert Finding("scale/ratio", Verdict.PASS, 0.5, 1.0).numbers() == "0.5 <= 1"
