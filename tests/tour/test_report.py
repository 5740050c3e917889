"""The page of the tour: complete, self-contained, accessible, and safe whatever a text contains."""

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from glassformer.config import presets
from glassformer.doctor.report import Diagnosis, Report
from glassformer.finding import Finding
from glassformer.sizing import size
from glassformer.theory.claims import find
from glassformer.theory.claims.run import Outcome
from glassformer.theory.claims.run import Plan as ClaimPlan
from glassformer.tour import report
from glassformer.tour.attention import AttentionMaps
from glassformer.tour.claims import CheckedClaim
from glassformer.tour.diagnosis import DiagnosedModel
from glassformer.tour.generation import CacheTiming, Sample, sampler_distributions
from glassformer.tour.run import Tour
from glassformer.tour.training import RUN, Corpus, TrainingRecord
from glassformer.tour.tuning import Answered, TuningRecord
from glassformer.training import read_run
from tests.pages.hostile import HOSTILE, assert_escaped, assert_self_contained, read


def make_claim(word: str) -> CheckedClaim:
    holds, broken = Finding.judge("claim", 0, 0, word), Finding.judge("claim", 1, 0, word)
    claim = dataclasses.replace(find("orthogonal-inputs-fixed-point"), title=word, control=word)
    return CheckedClaim(Outcome(claim, holds, 0.1, ClaimPlan()), Outcome(claim, broken, 0.1, ClaimPlan(broken=True)))


def make_diagnosed(word: str) -> list[DiagnosedModel]:
    leak = Finding.judge("causal_leak/future-token", 1, 0, word, word)
    diagnosis = Diagnosis(word, word, {"layer": 0}, (leak,), word)
    reports = Report(word, "decoder", (), ()), Report(word, "decoder", (diagnosis,), (leak,))
    return [DiagnosedModel(word, report, leak, 1.0) for report in reports]


def make_tour(word: str = "word") -> Tour:
    """A tour that needs no training; `word` stands wherever the text of a user can."""
    model = presets.nano(n_layers=1)
    tokens = list("To be ")
    row = [[1.0 / (t + 1) if s <= t else 0.0 for s in range(len(tokens))] for t in range(len(tokens))]
    run = dataclasses.replace(read_run(RUN), out=f"tour {word}")
    start = {"parameters": 7, "device": "cpu", "precision": "float32"}
    return Tour(
        sheet=size(presets.gpt2(), batch=8, context=1024),
        model_sheet=size(model),
        corpus=Corpus(word, word, 100, 10, 65, word, {"uniform": 4.17, "unigram": 3.3, "bigram": 2.5, "5-gram": 1.6}),
        run=run,
        training=TrainingRecord(start, [(1, 4.1), (10, 2.0)], [(0, 4.2), (10, 2.1)], 2.1, 61.0, 2.1, [(5, word)]),
        samples=[Sample("greedy", word, word + word), Sample("4 beams", "a", "ab"), Sample(word, word, word)],
        distributions=sampler_distributions(),
        attention=AttentionMaps([word, *tokens[1:]], [[row, row]], [[0.5, 0.25]], (0, 1)),
        cache=[CacheTiming(32, 0.1, 0.3, True), CacheTiming(64, 0.2, 0.9, False)],
        claims=[make_claim(word)],
        diagnosed=make_diagnosed(word),
        tuning=TuningRecord(9, 7, 5, [(0, 3.0), (5, 2.0)], 1.0, [Answered(word, word, word, word)]),
        findings=[
            Finding.judge(word, 1, 2, word),
            Finding.judge("broken", 3, 2, "why", "fix it"),
            Finding.skip("later", word),
        ],
        seconds=90.0,
    )


@pytest.fixture(scope="module")
def page() -> str:
    return report.page(make_tour())


def test_every_section_is_there_with_its_heading_and_a_link_to_it(page):
    reader = read(page)
    assert reader.ids.count("corpus") == 1
    for key, title in report.SECTIONS.items():
        assert key in reader.ids
        assert f"#{key}" in reader.links
        assert title in reader.text
    assert len(reader.ids) == len(set(reader.ids))
    assert sum(tag == "h1" for tag, _ in reader.tags) == 1


def test_nothing_is_fetched_and_nothing_runs(page):
    assert_self_contained(page)
    reader = read(page)
    assert all(link.startswith("#") for link in reader.links)
    for _, given in reader.tags:
        assert not {"src", "srcset", "xlink:href", "action", "background", "style"} & set(given)
        assert not any(name.startswith("on") for name in given)
    plain = page.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert not re.search(r"https?:|url\(|@import|//[a-z]", plain)


@pytest.mark.parametrize("word", ["word", HOSTILE])
def test_each_figure_is_well_formed_and_described_in_words(word):
    figures = re.findall(r"<svg.*?</svg>", report.page(make_tour(word)), re.S)
    assert len(figures) == 1 + 1 + 2 + 1 + 1  # curves, large map, small maps, bars of greedy, timings
    for figure in figures:
        root = ElementTree.fromstring(figure)
        space = "{http://www.w3.org/2000/svg}"
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"]
        assert root.find(f"{space}title").text
        assert root.find(f"{space}desc").text


def test_hostile_text_is_shown_as_text():
    assert_escaped(report.page(make_tour(HOSTILE)), report.page(make_tour("word")))


def test_light_and_dark_and_small_screens(page):
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert '<html lang="en">' in page
    tables = [given for tag, given in read(page).tags if tag == "div" and given.get("class") == "wide"]
    assert len(tables) == 6
    assert all(given["tabindex"] == "0" and given["aria-label"] for given in tables)


def test_a_verdict_is_never_shown_by_colour_alone(page):
    text = "".join(read(page).text)
    assert "✓ pass" in text
    assert "✗ fail" in text
    assert "– skip" in text
    assert "fix it" in text  # a failure brings its remedy
    assert "DIFFERENT" in text
    assert "1 of 3 findings\npassed" in text


def test_numbers_on_the_page_are_those_of_the_tour(page):
    text = "".join(read(page).text)
    for number in ("2.100", "4.170", "124,439,808", "3.0 ×", "61 seconds"):
        assert number in text
    assert "better than uniform, unigram and bigram." in text


def test_writing_leaves_a_whole_page_and_nothing_else(tmp_path):
    path = report.write(make_tour(), tmp_path / "new" / report.NAME)
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    report.write(make_tour("again"), path)
    assert [p.name for p in path.parent.iterdir()] == [report.NAME]


def test_a_failed_write_keeps_the_old_page(tmp_path, monkeypatch):
    path = report.write(make_tour(), tmp_path / report.NAME)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        report.write(make_tour("again"), path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_claims_and_diagnoses_are_on_the_page(page):
    text = "".join(read(page).text)
    assert "Bishop 12.3 is wrong." in text
    assert "glass check orthogonal-inputs-fixed-point --explain" in text
    assert "✓ healthy" in text
    assert "✗ bug found" in text
    assert "(layer 0)" in text


@pytest.mark.parametrize(
    ("names", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_names_are_enumerated(names, text):
    assert report._enumeration(names) == text
