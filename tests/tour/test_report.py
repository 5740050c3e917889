"""The page of the tour: whole, self-contained, accessible, and never fooled by what a text contains."""

import dataclasses
import re
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from glassformer.config import presets
from glassformer.doctor.report import Diagnosis, Report
from glassformer.finding import Finding
from glassformer.pages import svg as report_svg
from glassformer.sizing import size
from glassformer.theory.claims import find
from glassformer.theory.claims.run import Outcome
from glassformer.theory.claims.run import Plan as ClaimPlan
from glassformer.tour import report
from glassformer.tour.guide import CacheRace, Tour, samplers_on_one_distribution
from glassformer.tour.theory import Examined, Proof
from glassformer.tour.training import RUN, Attention, Spoken, Text, Training
from glassformer.training import read_run

HOSTILE = '</script><b onload="x">&amp;\x00\x0c\ud800 "quoted" </svg></pre>'
VOID = {"meta", "br", "link", "img", "hr", "input"}


def make_proof(word: str) -> Proof:
    whole, broken = Finding.judge("claim", 0, 0, word), Finding.judge("claim", 1, 0, word)
    claim = dataclasses.replace(find("orthogonal-inputs-fixed-point"), title=word, control=word)
    return Proof(Outcome(claim, whole, 0.1, ClaimPlan()), Outcome(claim, broken, 0.1, ClaimPlan(broken=True)))


def make_examined(word: str) -> list[Examined]:
    leak = Finding.judge("causal_leak/future-token", 1, 0, word, word)
    diagnosis = Diagnosis(word, word, {"layer": 0}, (leak,), word)
    reports = Report(word, "decoder", (), ()), Report(word, "decoder", (diagnosis,), (leak,))
    return [Examined(word, report, leak, 1.0) for report in reports]


def make_tour(word: str = "word") -> Tour:
    """A tour that needs no training; `word` stands wherever a text of a user can."""
    model = presets.nano(n_layers=1)
    tokens = list("To be ")
    row = [[1.0 / (t + 1) if s <= t else 0.0 for s in range(len(tokens))] for t in range(len(tokens))]
    run = dataclasses.replace(read_run(RUN), out=f"tour {word}")
    start = {"parameters": 7, "device": "cpu", "precision": "float32"}
    return Tour(
        sheet=size(presets.gpt2(), batch=8, context=1024),
        own=size(model),
        text=Text(word, word, 100, 10, 65, word, {"uniform": 4.17, "unigram": 3.3, "bigram": 2.5, "5-gram": 1.6}),
        run=run,
        training=Training(start, [(1, 4.1), (10, 2.0)], [(0, 4.2), (10, 2.1)], 2.1, 61.0, 2.1, [(5, word)]),
        spoken=[Spoken("greedy", word, word + word), Spoken("4 beams", "a", "ab")],
        samplers=samplers_on_one_distribution(),
        attention=Attention([word, *tokens[1:]], [[row, row]], [[0.5, 0.25]], (0, 1)),
        races=[CacheRace(32, 0.1, 0.3, True), CacheRace(64, 0.2, 0.9, False)],
        proofs=[make_proof(word)],
        examined=make_examined(word),
        findings=[
            Finding.judge(word, 1, 2, word),
            Finding.judge("broken", 3, 2, "why", "mend it"),
            Finding.skip("later", word),
        ],
        seconds=90.0,
    )


class Reader(HTMLParser):
    """Checks nesting, and collects what a test wants to know."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if "href" in given else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


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
    reader = read(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert all(link.startswith("#") for link in reader.links)
    for _, given in reader.tags:
        assert not {"src", "srcset", "xlink:href", "action", "background", "style"} & set(given)
        assert not any(name.startswith("on") for name in given)
    plain = page.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert not re.search(r"https?:|url\(|@import|//[a-z]", plain)


@pytest.mark.parametrize("word", ["word", HOSTILE])
def test_each_figure_is_well_formed_and_told_in_words(word):
    figures = re.findall(r"<svg.*?</svg>", report.page(make_tour(word)), re.S)
    assert len(figures) == 1 + 1 + 2 + 1 + 1  # curves, large map, small maps, bars of greedy, races
    for figure in figures:
        root = ElementTree.fromstring(figure)
        space = "{http://www.w3.org/2000/svg}"
        assert root.attrib["role"] == "img"
        assert root.attrib["aria-label"]
        assert root.find(f"{space}title").text
        assert root.find(f"{space}desc").text


def test_hostile_text_is_shown_not_obeyed():
    page = report.page(make_tour(HOSTILE))
    reader = read(page)  # nesting holds
    assert not any(tag == "script" or "onload" in given for tag, given in reader.tags)
    assert "</script>" not in page
    assert "\x00" not in page
    assert '</script><b onload="x">&amp;' in "".join(reader.text)
    page.encode("utf-8")


def test_light_and_dark_and_small_screens(page):
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page
    assert '<html lang="en">' in page
    tables = [given for tag, given in read(page).tags if tag == "div" and given.get("class") == "wide"]
    assert len(tables) == 5
    assert all(given["tabindex"] == "0" and given["aria-label"] for given in tables)


def test_a_verdict_is_never_told_by_colour_alone(page):
    text = "".join(read(page).text)
    assert "✓ pass" in text
    assert "✗ fail" in text
    assert "– skip" in text
    assert "mend it" in text  # a failure brings its remedy
    assert "DIFFERENT" in text
    assert "1 of 3 findings did not all hold" not in text
    assert "1 of 3 findings held" in text


def test_numbers_on_the_page_are_those_of_the_tour(page):
    text = "".join(read(page).text)
    for number in ("2.100", "4.170", "124,439,808", "3.0 ×", "61 seconds"):
        assert number in text
    assert "a better guess than uniform, unigram and bigram." in text


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


def test_labels_of_close_baselines_do_not_overlap():
    drawn = report_svg.loss_curves([(1, 4.0), (9, 2.0)], [(0, 4.0), (9, 2.0)], {"a": 2.0, "b": 1.99, "c": 1.98})
    heights = [float(y) for y in re.findall(r'y="([\d.]+)" text-anchor="start" class="">[abc] ', drawn)]
    assert len(heights) == 3
    assert min(b - a for a, b in pairwise(heights)) >= 17


@pytest.mark.parametrize(
    ("losses", "ticks"),
    [
        ((6.9, 4.6), ["4.5", "5", "5.5", "6", "6.5", "7"]),
        ((4.2, 1.5), ["1.5", "2", "2.5", "3", "3.5", "4", "4.5"]),
        ((0.041, 0.004), ["0", "0.01", "0.02", "0.03", "0.04", "0.05"]),
        ((3.0, 3.0), ["3", "3.1"]),
    ],
)
def test_the_axis_of_the_loss_is_that_of_the_data(losses, ticks):
    drawn = report_svg.loss_curves([(1, losses[0]), (9, losses[1])], [(9, losses[1])], {})
    assert re.findall(r'text-anchor="end" class="">([\d.]+)<', drawn) == ticks


def test_a_map_holds_every_cell_that_matters():
    pattern = [[1.0, 0.0], [0.25, 0.75]]
    drawn = report_svg.small_map(pattern, "x")
    assert drawn.count("h1v1h-1z") == 3
    assert 'fill-opacity="1"' in drawn
    assert 'fill-opacity="0.5"' in drawn
    assert report_svg.visible(" \n\t") == "␣⏎⇥"


def test_what_was_proven_and_what_the_doctor_said_are_told(page):
    text = "".join(read(page).text)
    assert "Bishop 12.3 has it wrong." in text
    assert "glass check orthogonal-inputs-fixed-point --explain" in text
    assert "✓ healthy" in text
    assert "✗ sick" in text
    assert "(layer 0)" in text
