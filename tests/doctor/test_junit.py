"""JUnit's XML: one case per probe, failures and skips with their words."""

from xml.etree import ElementTree as ET

from glassformer.doctor.junit import to_junit
from glassformer.doctor.report import Report
from glassformer.finding import Finding, Verdict
from tests.doctor.test_report import FAILED, SICK


def test_cases_failures_and_skips_are_counted():
    skipped = Finding.skip("pad_leak/content", "no mask <&>")
    root = ET.fromstring(to_junit(Report("thing", "decoder", (SICK,), (FAILED, skipped, Finding("a/b", Verdict.PASS)))))
    assert {k: root.get(k) for k in ("tests", "failures", "skipped")} == {"tests": "3", "failures": "1", "skipped": "1"}
    assert root.find("testcase/failure").get("message").startswith("0.5 > 0")
    assert root.find("testcase/skipped").get("message") == "no mask <&>"
