"""The report for a build server: one test case per probe, in JUnit's XML."""

import re
from collections import Counter
from xml.etree import ElementTree as ET

from glassformer.doctor.report import Report, explanation
from glassformer.finding import Finding, Verdict

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, escaped or not; an error message of a model may have them."""


def to_junit(report: Report) -> bytes:
    """Failures carry the diagnosis they led to, or the one that explains them; skips their reason."""
    counts, seen = report.counts, Counter[str]()
    totals = {
        "name": _text(f"glass doctor {report.subject}"),
        "tests": str(len(report.findings)),
        "failures": str(counts["fail"]),
        "errors": "0",
        "time": f"{report.seconds:.3f}",
    }
    root = ET.Element("testsuites", totals)  # the schema of Jenkins has no `skipped` here
    suite = ET.SubElement(root, "testsuite", totals, skipped=str(counts["skip"]))
    for finding in report.findings:
        seen[finding.id] += 1
        diagnosis, _, probe = finding.id.partition("/")
        # two cases of one name would be shown as one
        name = (probe or diagnosis) + (f" ({seen[finding.id]})" if seen[finding.id] > 1 else "")
        case = ET.SubElement(suite, "testcase", classname=f"doctor.{diagnosis}", name=name, time="0")
        if finding.verdict is Verdict.FAIL:
            message = _text(f"{finding.numbers()} {explanation(finding)}".strip())
            failure = ET.SubElement(case, "failure", message=message, type=diagnosis)
            failure.text = _text(f"{_place(report, finding)}\n{finding.text()}".strip())
        elif finding.verdict is Verdict.SKIP:
            ET.SubElement(case, "skipped", message=_text(finding.why))
    ET.SubElement(suite, "system-out").text = _text(report.text())
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="utf-8")


def _place(report: Report, finding: Finding) -> str:
    """The diagnosis that a failure belongs to or follows from."""
    for diagnosis in report.diagnoses:
        if finding in diagnosis.evidence:
            return f"{diagnosis.id}: {diagnosis.title}"
        if finding in diagnosis.consequences:
            return f"probably a consequence of {diagnosis.id}: {diagnosis.title}"
    return ""


def _text(text: str) -> str:
    return NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)
