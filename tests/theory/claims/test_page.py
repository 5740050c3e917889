"""The page: self-contained, formulas as MathML, figures that do not share ids, everything in it."""

import re
import sys
from html.parser import HTMLParser

import pytest

from glassformer.theory.claims import page as module
from glassformer.theory.claims.registry import coverage
from glassformer.theory.claims.run import Plan, run

IDS = ["orthogonal-inputs-fixed-point", "rope-relative", "softmax-shift-invariance", "greedy-vs-best"]
EMPTY = {"meta", "br", "img", "link", "input", "hr", "source", "use", "path", "rect", "image", "circle", "line"}


class Reader(HTMLParser):
    """Ids, links and whether tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.ids, self.targets, self.open, self.wrong = [], [], [], []

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        self.ids += [facts["id"]] if "id" in facts else []
        self.targets += [v for k, v in attrs if k in ("href", "src", "xlink:href") and v]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in EMPTY:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def outcomes():
    return list(run(IDS, Plan(draw=True)))


@pytest.fixture(scope="module")
def text(outcomes):
    return module.page(outcomes, Plan(draw=True))


def test_the_page_is_whole_and_every_id_is_its_own(text):
    reader = Reader()
    reader.feed(text)
    assert not reader.wrong
    assert not reader.open
    assert len(reader.ids) == len(set(reader.ids))
    inner = {target[1:] for target in reader.targets if target.startswith("#")}
    assert inner <= set(reader.ids)
    assert {f"#{id}" for id in IDS} <= set(reader.targets)
    clips = set(re.findall(r"url\(#([^)]+)\)", text))
    assert clips
    assert clips <= set(reader.ids)


def test_nothing_is_fetched_from_anywhere(text):
    reader = Reader()
    reader.feed(text)
    assert all(target.startswith(("#", "data:")) for target in reader.targets)
    assert "<script" not in text
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_claims_have_formulas_figures_evidence_and_errata(text, outcomes):
    assert text.count("<math") > 50
    assert text.count("<svg") == sum(bool(outcome.svg) for outcome in outcomes) == 3
    for outcome in outcomes:
        assert f'<article id="{outcome.claim.id}">' in text
        assert all(f'id="{erratum.id}"' in text for erratum in outcome.claim.errata)
    assert "proved" in text
    assert "prefers-color-scheme: dark" in text
    assert "$" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.DOTALL)


def test_the_coverage_table_has_every_row(text):
    table = text[text.index('id="coverage"') :]
    assert table.count("<tr>") == len(coverage()) + 1
    assert "ABSENT" in table


def test_without_the_converter_formulas_are_text_and_the_page_says_so(outcomes, monkeypatch):
    monkeypatch.setitem(sys.modules, "latex2mathml", None)
    monkeypatch.setitem(sys.modules, "latex2mathml.converter", None)
    text = module.page(outcomes, Plan())
    assert "<math" not in text
    assert "latex2mathml is not installed" in text
    assert "<code>y" in text


def test_words_cannot_break_the_page():
    render, _ = module.renderer()
    assert render("a < b & <script>") == "a &lt; b &amp; &lt;script&gt;"
    assert "<math" in render(r"so $a < b$")
    assert "<code>" in module._formula(r"\frac{", False, lambda *a, **k: 1 / 0)


def test_ids_of_a_figure_get_its_name():
    svg = '<svg><metadata>x</metadata><clipPath id="p1"/><g clip-path="url(#p1)"><use xlink:href="#p1"/></g></svg>'
    named = module.namespaced(svg, "a")
    assert named == '<svg><clipPath id="a-p1"/><g clip-path="url(#a-p1)"><use xlink:href="#a-p1"/></g></svg>'


def test_a_failure_opens_its_evidence(tmp_path):
    plan = Plan(broken=True)
    outcomes = list(run(["rope-relative"], plan))
    assert "controls turned" in module.write(outcomes, plan, tmp_path / "a.html").read_text()
