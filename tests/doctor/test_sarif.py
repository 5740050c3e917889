"""SARIF: one result per diagnosis, with a rule and a place."""

import json

from glassformer.doctor.sarif import Place, place_of, to_sarif
from tests.bugs.zoo import by_id
from tests.doctor.test_markdown import REPORT


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
    assert result["locations"][0] == {"logicalLocations": [{"fullyQualifiedName": "mine (1)"}]}
