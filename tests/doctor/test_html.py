"""The page has everything, escaped, and draws the leak matrix."""

import dataclasses
import math

from glassformer.doctor.html import display, to_html
from glassformer.doctor.report import MINIMUM, Diagnosis, Report
from glassformer.finding import Finding, Verdict
from tests.doctor.test_report import FAILED, SICK
from tests.pages.hostile import HOSTILE, assert_escaped, assert_self_contained, assert_static_fragment

LEAK = {"leak": [[1.0, 0.5], [1.0, 1.0]]}


def test_the_page_is_complete_and_draws_the_leak():
    page = to_html(Report("<thing>", "decoder", (SICK,), (FAILED,), ("a note",), 1.0, LEAK))
    assert_self_contained(page)
    assert "&lt;thing&gt;" in page
    assert "<thing>" not in page
    assert page.count("<rect") == 4
    assert "output 0, input 1: 0.5" in page
    assert 'class="cells future"' in page  # output 0 depends on input 1
    assert 'name="viewport"' in page
    assert ">input that changed</text>" in page
    assert "a note" in page
    assert FAILED.id in page


def test_hostile_text_is_shown_as_text():
    def page(word: str) -> str:
        finding = Finding.judge(word, 1, 0, word, word, cause=word)
        diagnosis = Diagnosis(word, word, {word: word}, (finding,), word, (dataclasses.replace(finding),))
        return to_html(Report(word, word, (diagnosis,), (finding,), (word,), 1.0, LEAK))

    assert_escaped(page(HOSTILE), page("word"))


def test_a_leak_that_is_not_finite_is_drawn():
    matrix = [[1.0, math.nan], [math.inf, 2.0]]
    page = to_html(Report("model", "decoder", (), (), (), 1.0, {"leak": matrix}))
    assert "output 0, input 1: nan" in page
    assert "output 1, input 0: inf" in page
    assert page.count("<rect") == 4
    assert "leak" not in to_html(Report("model", "decoder", (), ())).lower()


def test_a_healthy_model_says_so():
    passed = dataclasses.replace(FAILED, verdict=Verdict.PASS)
    assert '<p class="healthy">model (decoder): healthy' in to_html(Report("model", "decoder", (), (passed,) * MINIMUM))
    few = to_html(Report("model", "decoder", (), (passed,) * (MINIMUM - 1)))
    assert "model (decoder): not examined" in few
    assert 'class="healthy"' not in few


LEAKING = dataclasses.replace(SICK, id="causal_leak")


def test_the_display_in_a_notebook_has_verdict_evidence_fix_probes_and_leak():
    report = Report("thing", "decoder", (LEAKING,), (FAILED,), ("a note",), 1.0, LEAK)
    reader = assert_static_fragment(report._repr_html_())
    text = "".join(reader.text)
    assert report.verdict() in text
    assert f"Fix. {SICK.remedy}" in text
    assert "1 probes: 0 passed, 1 failed, 0 could not be made" in text
    assert "a note" in text
    assert text.count(FAILED.id) >= 1
    assert next(given["alt"] for tag, given in reader.tags if tag == "img").startswith("Which input")


def test_the_display_draws_the_leak_matrix_only_if_there_is_a_leak():
    healthy = Report(
        "thing", "decoder", (), (dataclasses.replace(FAILED, verdict=Verdict.PASS),) * MINIMUM, (), 1.0, LEAK
    )
    assert "<img" not in healthy._repr_html_()
    assert "✓ healthy" in healthy._repr_html_()
    assert "– not examined" in Report("thing", "decoder", (), ())._repr_html_()


def test_hostile_text_is_shown_as_text_in_a_notebook():
    def made(word: str) -> str:
        finding = Finding.judge(word, 1, 0, word, word, cause=word)
        diagnosis = Diagnosis("causal_leak", word, {word: word}, (finding,), word, (dataclasses.replace(finding),))
        return display(Report(word, word, (diagnosis,), (finding,), (word,), 1.0, LEAK))

    assert_escaped(made(HOSTILE), made("word"))
