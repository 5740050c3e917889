"""A report says verdict, location, evidence, remedy and consequences, for people and for machines."""

import json
from dataclasses import replace

from glassformer.doctor.report import MINIMUM, TITLES, Diagnosis, Report, explanation
from glassformer.finding import Finding, Verdict

FAILED = Finding("causal_leak/future-token", Verdict.FAIL, 0.5, 0.0, "exact", "mask it", {"cut": 3})
AFTER = Finding("cache_mismatch/steps", Verdict.FAIL, 0.1, 0.0)
SICK = Diagnosis("causal_leak", TITLES["causal_leak"], {"layer": 1, "heads": []}, (FAILED,), "mask it", (AFTER,))


def report(*diagnoses, **given):
    return Report("thing", "decoder", diagnoses, (FAILED, AFTER), **given)


def test_text_names_cause_place_remedy_and_consequence():
    text = report(SICK, notes=("a note",)).text()
    for words in ("causal_leak", "layer 1", "mask it", "cache_mismatch/steps", "a note", "0.5 > 0"):
        assert words in text
    assert SICK.layer == 1


def test_json_form_is_json_and_a_healthy_report_has_no_diagnoses():
    data = json.loads(json.dumps(report(SICK).to_dict()))
    assert data["diagnoses"][0]["id"] == "causal_leak"
    assert not data["healthy"]
    healthy = Report("thing", "decoder", (), (Finding("causal_leak/b", Verdict.PASS),) * MINIMUM)
    assert healthy.healthy
    assert f"healthy as far as {MINIMUM} probes can see; 0 not made (1 of {len(TITLES)} diagnoses" in healthy.verdict()


def test_too_few_probes_are_no_health():
    made, skipped = Finding("causal_leak/b", Verdict.PASS), Finding.skip("pad_leak/b", "no mask")
    few = Report("thing", "decoder", (), (made,) * 2 + (skipped,) * 29)
    assert not few.healthy
    assert not few.examined
    assert "not examined: only 2 probes could be made and 29 could not" in few.verdict()
    assert few.coverage == ("causal_leak",)
    assert not few.to_dict()["examined"]
    assert report(SICK).examined


def test_a_failed_comparison_says_that_its_reason_is_that_of_the_bound():
    compared = replace(FAILED, evidence={"weights": "as given"})
    assert explanation(compared) == "more than the bound allows (exact)"
    assert explanation(FAILED) == "exact"
    assert explanation(replace(compared, evidence={"weights": "as given", "cause": "no mask"})) == "no mask"
    assert replace(SICK, location={"row": 1}).where() == "batch element 1"
