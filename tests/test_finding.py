import json

import pytest

from glassformer.finding import Finding, Verdict


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
    good = Finding.judge("cache", 1e-12, 1e-10, "rounding", "mend it")
    assert good.text() == "pass  cache  1e-12 <= 1e-10  (rounding)"
    bad = Finding.judge("cache", 1e-3, 1e-10, "rounding", "mend it")
    assert bad.text() == "fail  cache  0.001 > 1e-10  (rounding)\n      remedy: mend it"
    assert "nan is not <= 1" in Finding.judge("x", float("nan"), 1.0, "").text()


def test_json_form_is_json_even_for_nan():
    text = json.dumps(Finding.judge("x", float("nan"), 1.0, "why", rows=[1, 2]).to_dict(), allow_nan=False)
    back = json.loads(text)
    assert back["measured"] == "nan"
    assert back["verdict"] == "fail"
    assert back["evidence"] == {"rows": [1, 2]}
