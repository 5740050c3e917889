"""A comparison as one page that needs nothing else."""

import math
import re

import pytest

from glassformer import config as c
from glassformer.anatomy.roles import Step
from glassformer.doctor.compare import compare
from glassformer.doctor.compare.page import AFTER, BEFORE, display, page, write
from glassformer.doctor.compare.parameters import ParameterGap
from glassformer.doctor.compare.result import Comparison, Measured
from glassformer.doctor.compare.scene import Explanation
from tests.doctor.compare.pairs import ours, theirs
from tests.pages.hostile import HOSTILE, assert_escaped, assert_self_contained, assert_static_fragment
from tests.studio.page import needs_browser, opened


def test_the_page_holds_verdict_cases_and_every_place(tmp_path):
    result = compare(
        theirs("gpt2"), ours("gpt2", feedforward=c.Dense(d_ff=40, activation="gelu")), names=("<theirs>", "ours")
    )
    write(result, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text == page(result)
    assert "&lt;theirs&gt;" in text
    assert "<theirs>" not in text
    assert "tanh GELU" in text
    assert "GELU variant" in text
    assert all(f"<code>{step.name}</code>" in text for step in result.steps)
    assert len(re.findall('<tr class="bad first">', text)) == 1
    assert_self_contained(text)


def test_the_display_in_a_notebook_shows_the_activations_around_the_first_difference():
    steps = [Step(f"step {i}", 1e-3 if i >= 20 else 0.0, i >= 20) for i in range(40)]
    measured = [Measured("5 tokens", 1e-3, 1e-3, 1e-9, "why"), Measured("cached", None, None, 1e-9, "why", "no cache")]
    result = Comparison(("left", "right"), "differ", measured, steps, "5 tokens", "step 20", 1e-3, notes=["a note"])
    text = "".join(assert_static_fragment(result._repr_html_(), 20_000).text)
    assert result.sentence() in text
    assert text.count("step ") >= BEFORE + AFTER + 1
    assert f"step {20 - BEFORE}" in text
    assert f"step {20 + AFTER}" in text
    assert f"step {20 - BEFORE - 1}" not in text
    assert f"step {20 + AFTER + 1}" not in text
    assert text.count("← first difference") == 1
    assert all(word in text for word in ("left", "right", "no cache", "could not be measured", "a note"))


def test_equal_models_have_a_display_without_activations():
    text = "".join(assert_static_fragment(compare(ours("gpt2"), ours("gpt2"))._repr_html_()).text)
    assert "✓ same: " in text
    assert "activation" not in text


def test_equal_models_have_a_page_too():
    assert "same: " in page(compare(ours("gpt2"), ours("gpt2")))


@pytest.mark.parametrize("shown", [page, display])
def test_hostile_text_is_shown_as_text(shown):
    def made(word: str) -> str:
        measured = [Measured(word, 1.0, None, 0.1, word, word), Measured(word, None, None, 0.1, word)]
        result = Comparison(
            names=(word, word),
            verdict="differ",
            measured=measured,
            steps=[Step(word, math.inf, True), Step(word, 0.0, False), Step(word, math.nan, True, True)],
            case=word,
            first=word,
            difference=1.0,
            explanation=Explanation(word, word, 0.0),
            parameters=[ParameterGap(word, word, 1.0)],
            notes=[word],
        )
        return shown(result)

    assert_escaped(made(HOSTILE), made("word"))


@pytest.mark.parametrize(
    ("difference", "percent"),
    [(0.0, 0), (1e-300, 0), (1e-17, 0), (1e2, 100), (1e9, 100), (math.inf, 100), (math.nan, 100)],
)
def test_bars_are_logarithmic_and_within_their_scale(difference, percent):
    result = Comparison(("a", "b"), "differ", [], [Step("x", difference, True)])
    assert f'style="width: {percent:.1f}%"' in page(result)


@pytest.mark.slow
@needs_browser
def test_nothing_sticks_out_of_a_narrow_window():
    result = compare(ours("gpt2"), ours("gpt2", feedforward=c.Dense(d_ff=40, activation="gelu")))
    assert result.steps
    with opened("") as site:
        narrow = site.browser.new_page(viewport={"width": 400, "height": 900})
        narrow.set_content(page(result))
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
