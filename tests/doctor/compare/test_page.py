"""A comparison as one page that needs nothing else."""

import re

from glassformer import config as c
from glassformer.doctor.compare import compare
from glassformer.doctor.compare.page import page, write
from tests.doctor.compare.pairs import ours, theirs
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
    assert len(re.findall("<tr class='bad first'>", text)) == 1
    assert not re.search(r"(src|href)\\s*=", text)


def test_equal_models_have_a_page_too():
    assert "same: " in page(compare(ours("gpt2"), ours("gpt2")))


@needs_browser
def test_nothing_sticks_out_of_a_narrow_window():
    result = compare(ours("gpt2"), ours("gpt2", feedforward=c.Dense(d_ff=40, activation="gelu")))
    assert result.steps
    with opened("") as site:
        narrow = site.browser.new_page(viewport={"width": 400, "height": 900})
        narrow.set_content(page(result))
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
