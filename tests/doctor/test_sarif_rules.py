"""The structure that SARIF 2.1.0 and code scanning ask for, on reports with and without diagnoses."""

import json
import math
from dataclasses import replace
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit

import pytest
import transformers

import glassformer as gf
from glassformer.doctor.report import Report
from glassformer.doctor.sarif import Place, place_of, to_sarif
from tests.bugs.zoo import by_id
from tests.doctor.test_markdown import DIAGNOSIS, FAILED, REPORT, SKIPPED

LEVELS = {"none", "note", "warning", "error"}


def check_text(message):
    assert isinstance(message["text"], str)
    assert message["text"].strip()


def check_rule(rule):
    assert rule["id"].strip()
    for part in ("shortDescription", "fullDescription", "help"):
        check_text(rule[part])
    assert rule["defaultConfiguration"]["level"] in LEVELS


def check_physical(location):
    uri = location["artifactLocation"]["uri"]
    parts = urlsplit(uri)
    assert uri
    assert not parts.scheme, uri
    assert not parts.netloc, uri
    path = PurePosixPath(unquote(parts.path))
    assert not path.is_absolute(), uri
    assert ".." not in path.parts
    assert " " not in uri
    region = location["region"]
    assert type(region["startLine"]) is int
    assert 1 <= region["startLine"] <= region.get("endLine", region["startLine"])


def check_result(result, rules):
    assert result["ruleId"] in [rule["id"] for rule in rules]
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    check_text(result["message"])
    assert result["level"] in LEVELS
    assert result["locations"]
    for location in result["locations"]:
        check_physical(location["physicalLocation"])
    assert all(isinstance(v, str) and v for v in result["partialFingerprints"].values())


def check_sarif(document):
    """Raise an AssertionError unless the document, as JSON, follows the rules."""
    document = json.loads(json.dumps(document, allow_nan=False))
    assert document["version"] == "2.1.0"
    assert "sarif" in document["$schema"]
    assert "2.1.0" in document["$schema"]
    assert document["runs"]
    for run in document["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"].strip()
        ids = [rule["id"] for rule in driver["rules"]]
        assert len(set(ids)) == len(ids)
        for rule in driver["rules"]:
            check_rule(rule)
        for result in run["results"]:
            check_result(result, driver["rules"])
        for call in run["invocations"]:
            assert type(call["executionSuccessful"]) is bool
            for note in call["toolExecutionNotifications"]:
                assert note["level"] in LEVELS
                check_text(note["message"])


HERE = Place("models/mine.py", 7, "Mine", 30)
TWO = replace(REPORT, diagnoses=(DIAGNOSIS, replace(DIAGNOSIS, id="norm_eps", remedy="")))
ENDLESS = replace(REPORT, diagnoses=(replace(DIAGNOSIS, evidence=(replace(FAILED, measured=math.inf),)),))
REPORTS = {
    "one": REPORT,
    "two": TWO,
    "healthy": Report("mine", "decoder", (), (SKIPPED,) * 3),
    "nothing": Report("mine", "decoder", (), ()),
    "infinite": ENDLESS,
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_follows_the_rules(name):
    check_sarif(to_sarif(REPORTS[name], "1.2", HERE))


def test_a_model_that_was_examined_follows_the_rules():
    model = by_id("no_causal_mask").build()
    report = gf.diagnose(model, quick=True)
    assert report.diagnoses
    check_sarif(to_sarif(report, "1.2", place_of(model)))


@pytest.mark.parametrize("inside", [True, False])
def test_no_path_is_absolute_wherever_the_class_is_written(inside, tmp_path, monkeypatch):
    if not inside:
        monkeypatch.chdir(tmp_path)
    for model in (by_id("no_causal_mask").build(), transformers.GPT2Config):
        check_sarif(to_sarif(REPORT, "1", place_of(model)))
    # a file of a package is found again from the folder that the package is imported from
    library = place_of(transformers.GPT2Config).uri
    assert library.endswith("transformers/models/gpt2/configuration_gpt2.py")
    assert (library == "transformers/models/gpt2/configuration_gpt2.py") or inside


def test_a_script_outside_the_working_directory_is_named_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "my model.py").write_text("x = 1\n")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert place_of(5, f"{tmp_path}/my model.py:x") == Place("my%20model.py", 1, "int")


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(version="2.0.0"),
        lambda d: d.pop("$schema"),
        lambda d: d["runs"][0]["tool"]["driver"].update(name=" "),
        lambda d: d["runs"][0]["tool"]["driver"]["rules"].pop(),
        lambda d: d["runs"][0]["results"][0].update(level="fatal"),
        lambda d: d["runs"][0]["results"][0]["message"].update(text=""),
        lambda d: d["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"].update(startLine=0),
        lambda d: d["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"].update(
            uri="/a/b.py"
        ),
        lambda d: d["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"].update(
            uri="file:///a"
        ),
    ],
)
def test_the_rules_refuse_a_document_that_breaks_one(change):
    document = to_sarif(TWO, "1.2", HERE)
    check_sarif(document)
    change(document)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        check_sarif(document)
