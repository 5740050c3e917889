"""JUnit's XML: one case per probe, failures and skips with their words."""

from xml.etree import ElementTree as ET

from glassformer.doctor.junit import to_junit
from glassformer.doctor.report import Report
from glassformer.finding import Finding, Verdict
from tests.doctor.test_report import FAILED, SICK


def test_cases_failures_and_skips_are_counted():
    skipped = Finding.skip("pad_leak/content", "no mask <&>")
    (root,) = ET.fromstring(
        to_junit(Report("thing", "decoder", (SICK,), (FAILED, skipped, Finding("a/b", Verdict.PASS))))
    )
    assert {k: root.get(k) for k in ("tests", "failures", "skipped")} == {"tests": "3", "failures": "1", "skipped": "1"}
    assert root.find("testcase/failure").get("message").startswith("0.5 > 0")
    assert root.find("testcase/skipped").get("message") == "no mask <&>"


def test_cases_of_one_probe_have_names_of_their_own():
    twice = Finding("a/b", Verdict.PASS)
    root = ET.fromstring(to_junit(Report("thing", "decoder", (), (twice, twice))))
    assert [case.get("name") for case in root.iter("testcase")] == ["b", "b (2)"]


def test_a_failure_names_its_diagnosis_and_characters_are_valid():
    odd = Finding.skip("pad_leak/content", "it stopped with \x1b[31mred\x00")
    (root,) = ET.fromstring(to_junit(Report("thing", "decoder", (SICK,), (FAILED, odd))))
    assert root.find("testcase/failure").text.startswith(f"{SICK.id}: {SICK.title}")
    assert "[31mred" in root.find("testcase/skipped").get("message")
