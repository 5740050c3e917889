"""A report says verdict, location, evidence, remedy and consequences, for people and for machines."""

import json

from glassformer.doctor.report import TITLES, Diagnosis, Report
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
    healthy = Report("thing", "decoder", (), (Finding("a/b", Verdict.PASS),))
    assert healthy.healthy
    assert "healthy as far as 1 probe can see" in healthy.verdict()
