"""SARIF: one result per diagnosis, with a rule and a place."""

import json
import math
from dataclasses import replace

from glassformer.doctor.report import Report
from glassformer.doctor.sarif import Place, place_of, to_sarif
from tests.bugs.zoo import by_id
from tests.doctor.test_markdown import DIAGNOSIS, FAILED, REPORT, SKIPPED


def test_results_name_their_rule_and_place():
    document = json.loads(json.dumps(to_sarif(REPORT, "1.2", Place("models/mine.py", 7, "Mine"))))
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    driver, (result,) = run["tool"]["driver"], run["results"]
    assert driver["version"] == "1.2"
    assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "attn_scale"
    place = result["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("models/mine.py", 7)
    assert "layer 1" in result["message"]["text"]
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["descriptor"]["id"] == "cache_mismatch/steps"


def test_a_model_is_placed_where_its_class_is_written():
    place = place_of(by_id("no_causal_mask").build())
    assert place.uri.endswith("tests/bugs/zoo_attention.py")
    assert place.line > 1
    assert place_of(5, "nowhere.py:x") is None


def test_without_a_place_the_subject_is_named():
    (result,) = to_sarif(REPORT, "1")["runs"][0]["results"]
    assert result["locations"][0] == {"logicalLocations": [{"fullyQualifiedName": "mine (layer 1)"}]}


def test_infinite_evidence_is_valid_json():
    endless = replace(FAILED, measured=math.inf, evidence={"float64": math.inf, "sizes": [1.0, math.nan]})
    report = replace(REPORT, diagnoses=(replace(DIAGNOSIS, evidence=(endless,)),))
    assert json.dumps(to_sarif(report, "1"), allow_nan=False)


def test_a_model_that_could_not_be_examined_is_no_success():
    (run,) = to_sarif(Report("mine", "decoder", (), (SKIPPED,)), "1")["runs"]
    (call,) = run["invocations"]
    assert not call["executionSuccessful"]
    assert "not examined" in call["toolExecutionNotifications"][0]["message"]["text"]


def test_what_was_found_and_is_no_bug_reads_so():
    known = replace(SKIPPED, evidence={"explained": True})
    (run,) = to_sarif(replace(REPORT, findings=(known,)), "1")["runs"]
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert "(found, not a bug)" in note["message"]["text"]


def test_a_file_name_with_a_blank_is_a_uri(tmp_path, monkeypatch):
    (tmp_path / "my model.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert place_of(5, "my model.py:x").uri == "my%20model.py"
