"""The page has everything, escaped, and draws the leak matrix."""

import dataclasses
import math

from glassformer.doctor.html import to_html
from glassformer.doctor.report import MINIMUM, Diagnosis, Report
from glassformer.finding import Finding, Verdict
from tests.doctor.test_report import FAILED, SICK
from tests.pages.hostile import HOSTILE, assert_escaped, assert_self_contained

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
