"""The page: self-contained, formulas as MathML, figures that do not share ids, everything in it."""

import dataclasses
import re
import sys

import pytest

from glassformer.theory.claims import page as module
from glassformer.theory.claims.registry import coverage
from glassformer.theory.claims.run import Plan, run
from tests.pages.hostile import HOSTILE, assert_escaped, assert_self_contained, read

IDS = ["orthogonal-inputs-fixed-point", "rope-relative", "softmax-shift-invariance", "greedy-vs-best"]


@pytest.fixture(scope="module")
def outcomes():
    return list(run(IDS, Plan(draw=True)))


@pytest.fixture(scope="module")
def text(outcomes):
    return module.page(outcomes, Plan(draw=True))


def test_the_page_is_whole_and_every_id_is_its_own(text):
    reader = read(text)
    assert len(reader.ids) == len(set(reader.ids))
    inner = {target[1:] for target in reader.links if target.startswith("#")}
    assert inner <= set(reader.ids)
    assert {f"#{id}" for id in IDS} <= set(reader.links)
    clips = set(re.findall(r"url\(#([^)]+)\)", text))
    assert clips
    assert clips <= set(reader.ids)


def test_nothing_is_fetched_from_anywhere(text):
    assert_self_contained(text)
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


def test_without_the_converter_formulas_are_text_and_the_page_states_it(outcomes, monkeypatch):
    monkeypatch.setitem(sys.modules, "latex2mathml", None)
    monkeypatch.setitem(sys.modules, "latex2mathml.converter", None)
    text = module.page(outcomes, Plan())
    assert "<math" not in text
    assert "latex2mathml is not installed" in text
    assert "<code>y" in text


def test_text_with_formulas_is_escaped():
    assert module.formulas("a < b & <script>") == "a &lt; b &amp; &lt;script&gt;"
    assert "<math" in module.formulas(r"so $a < b$")
    assert "<script" not in module.formulas(r"so $\text{<script>x</script>}$")
    assert module._formula(r"\frac{<b>", False, lambda *a, **k: 1 / 0) == "<code>(&lt; b &gt;)/</code>"


def test_hostile_text_is_shown_as_text(outcomes):
    def page(word: str) -> str:
        outcome = outcomes[0]
        source = dataclasses.replace(outcome.claim.sources[0], cite=word, says=word, note=word)
        erratum = dataclasses.replace(outcome.claim.errata[0], states=word, fails=word, correct=word, example=word)
        erratum = dataclasses.replace(erratum, sources=(word,))
        claim = dataclasses.replace(
            outcome.claim,
            title=word,
            statement=word,
            derivation=(word,),
            control=word,
            sources=(source,),
            errata=(erratum,),
        )
        part = {
            **outcome.parts[0],
            "id": word,
            "why": word,
            "evidence": {"kind": outcome.parts[0]["evidence"]["kind"], word: word},
        }
        finding = dataclasses.replace(outcome.finding, why=word, evidence={"parts": [part]})
        return module.page([dataclasses.replace(outcome, claim=claim, finding=finding)], Plan())

    assert_escaped(page(HOSTILE), page("word"))


def test_ids_of_a_figure_get_its_name():
    svg = '<svg><metadata>x</metadata><clipPath id="p1"/><g clip-path="url(#p1)"><use xlink:href="#p1"/></g></svg>'
    named = module.namespaced(svg, "a")
    assert named == '<svg><clipPath id="a-p1"/><g clip-path="url(#a-p1)"><use xlink:href="#a-p1"/></g></svg>'


def test_a_failure_opens_its_evidence(tmp_path):
    plan = Plan(broken=True)
    outcomes = list(run(["rope-relative"], plan))
    assert "1 of 1 controls fail, as they must" in module.write(outcomes, plan, tmp_path / "a.html").read_text()
