"""The conventions of JUnit's XML that build servers rely on: counts, failures with message and type, times."""

from xml.etree import ElementTree as ET

import pytest

import glassformer as gf
from glassformer.doctor.junit import to_junit
from glassformer.doctor.report import Report
from glassformer.finding import Finding, Verdict
from tests.bugs.zoo import by_id
from tests.doctor.test_report import FAILED, SICK

ODD = Finding.skip("pad_leak/content", 'it stopped with <\x1b[31m"red"&\x00>')
TOTALS = {"name", "tests", "failures", "errors", "time"}
REPORTS = {
    "sick": Report("mine", "decoder", (SICK,), (FAILED, FAILED, ODD, Finding("a/b", Verdict.PASS)), seconds=1.25),
    "healthy": Report("mine", "decoder", (), (Finding("a/b", Verdict.PASS),) * 9),
    "nothing": Report("<lambda>", "decoder", (), ()),
}


def check_junit(data):
    """Raise an AssertionError unless the document follows the conventions."""
    assert data.startswith(b"<?xml")
    root = ET.fromstring(data)
    assert root.tag == "testsuites"
    assert [child.tag for child in root] == ["testsuite"] * len(root)
    assert set(root.attrib) == TOTALS
    for group in (root, *root):
        cases = list(group.iter("testcase"))
        assert int(group.get("tests")) == len(cases)
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            if group is root and name == "skipped":
                continue  # Jenkins refuses it there
            assert int(group.get(name)) == sum(case.find(tag) is not None for case in cases), name
        assert float(group.get("time")) >= 0
        assert group.get("name")
    for suite in root:
        assert set(suite.attrib) == {*TOTALS, "skipped"}
        names = [(case.get("classname"), case.get("name")) for case in suite.iter("testcase")]
        assert len(set(names)) == len(names)
        order = [child.tag for child in suite]
        assert order == sorted(order, key=["testcase", "system-out", "system-err"].index)
    for case in root.iter("testcase"):
        assert case.get("classname")
        assert case.get("name")
        assert float(case.get("time")) >= 0
        assert len(case) <= 1, "a case has one outcome"
        for outcome in case:
            assert outcome.tag in ("failure", "error", "skipped")
            assert outcome.get("message")
            if outcome.tag != "skipped":
                assert outcome.get("type")
                assert outcome.text.strip()


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_follows_the_conventions(name):
    check_junit(to_junit(REPORTS[name]))


def test_a_model_that_was_examined_follows_the_conventions():
    report = gf.diagnose(by_id("no_causal_mask").build(), quick=True)
    assert report.counts["fail"]
    check_junit(to_junit(report))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'tests="4"', b'tests="5"'),
        (b'failures="2"', b'failures="1"'),
        (b'time="1.250"', b'time="soon"'),
        (b' type="', b' kind="'),
        (b' message="', b' text="'),
        (b"testsuites", b"suites"),
    ],
)
def test_the_check_refuses_a_document_that_breaks_one(old, new):
    data = to_junit(REPORTS["sick"])
    assert old in data
    with pytest.raises((AssertionError, ValueError)):
        check_junit(data.replace(old, new))
