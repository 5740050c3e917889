"""The report for a build server: one test case per probe, in JUnit's XML."""

from xml.etree import ElementTree as ET

from glassformer.doctor.report import Report
from glassformer.finding import Verdict


def to_junit(report: Report) -> bytes:
    """Failures carry the diagnosis they led to; skips their reason."""
    counts = report.counts
    suite = ET.Element(
        "testsuite",
        name=f"glass doctor {report.subject}",
        tests=str(len(report.findings)),
        failures=str(counts["fail"]),
        skipped=str(counts["skip"]),
        time=f"{report.seconds:.3f}",
    )
    for finding in report.findings:
        diagnosis, _, probe = finding.id.partition("/")
        case = ET.SubElement(suite, "testcase", classname=f"doctor.{diagnosis}", name=probe or diagnosis)
        if finding.verdict is Verdict.FAIL:
            failure = ET.SubElement(case, "failure", message=f"{finding.numbers()} {finding.why}".strip())
            failure.text = finding.text()
        elif finding.verdict is Verdict.SKIP:
            ET.SubElement(case, "skipped", message=finding.why)
    ET.SubElement(suite, "system-out").text = report.text()
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suite, encoding="utf-8")
