"""The SVG figures: well-formed, described in words, and complete."""

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from glassformer.pages import svg
from tests.pages.hostile import HOSTILE, VISIBLE

SPACE = "{http://www.w3.org/2000/svg}"
FIGURES = {
    "curves": lambda word: svg.loss_curves([(1, 4.0), (9, 2.0)], [(0, 4.0), (9, 2.0)], {word: 2.0}),
    "small map": lambda word: svg.attention_map([[1.0, 0.0], [0.5, 0.5]], word),
    "large map": lambda word: svg.attention_map(
        [[1.0, 0.0], [0.5, 0.5]], word, word, labels=[word, word], row_axis=word, column_axis=word,
        hover=lambda t, s: word,
    ),
    "bars": lambda word: svg.probability_bars([0.5, 0.5, 0.0], word),
    "timings": lambda word: svg.timing_bars([(word, 2.0, 1.0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_each_figure_is_well_formed_and_described_in_words(name):
    root = ElementTree.fromstring(FIGURES[name](HOSTILE))
    plain = ElementTree.fromstring(FIGURES[name]("word"))
    assert [(e.tag, sorted(e.attrib)) for e in root.iter()] == [(e.tag, sorted(e.attrib)) for e in plain.iter()]
    assert VISIBLE in "".join(root.itertext())
    assert root.attrib["role"] == "img"
    assert root.attrib["aria-label"]
    assert root.find(f"{SPACE}title").text
    assert root.find(f"{SPACE}desc").text


def test_labels_of_close_baselines_do_not_overlap():
    drawn = svg.loss_curves([(1, 4.0), (9, 2.0)], [(0, 4.0), (9, 2.0)], {"a": 2.0, "b": 1.99, "c": 1.98})
    heights = [float(y) for y in re.findall(r'y="([\d.]+)" text-anchor="start" class="">[abc] ', drawn)]
    assert len(heights) == 3
    assert min(b - a for a, b in pairwise(heights)) >= 17


def test_a_small_map_has_every_cell_of_a_visible_weight_and_nothing_else():
    drawn = svg.attention_map([[1.0, 0.0], [0.25, 0.75]], "x")
    assert drawn.count("h1v1h-1z") == 3
    assert 'fill-opacity="1"' in drawn
    assert 'fill-opacity="0.5"' in drawn
    assert "<text" not in drawn
    assert "<rect" not in drawn
    assert 'class="small-map" viewBox="0 0 2 2"' in drawn


def test_a_large_map_labels_its_axes_and_names_heavy_cells():
    drawn = svg.attention_map([[1.0, 0.0], [0.04, 0.96]], "x", labels=["a", "b"], hover=lambda t, s: f"{t} to {s}")
    assert re.findall(r"<title>(\d to \d)</title>", drawn) == ["0 to 0", "1 to 1"]
    assert drawn.count(">a</text>") == drawn.count(">b</text>") == 2


def test_the_faintest_weight_can_be_given_an_opacity_and_the_future_a_colour():
    values = [[1.0, 1e-9], [0.0, 1.0]]
    plain = svg.attention_map(values, "x")
    marked = svg.attention_map(values, "x", faintest=0.2, mark_future=True)
    assert "future" not in plain
    assert '<path class="cells future" fill-opacity="0.2" d="M1 0h1v1h-1z"/>' in marked
    assert marked.count("h1v1h-1z") == 3  # 0 stays invisible


def test_values_that_are_not_finite_are_drawn_as_the_largest():
    drawn = svg.attention_map([[math.nan, math.inf], [0.0, 0.0]], "x", labels="ab", hover=lambda t, s: "bad")
    assert 'fill-opacity="1"' in drawn
    assert drawn.count("<title>bad</title>") == 2
    ElementTree.fromstring(drawn)


def test_white_space_of_a_token_is_visible():
    assert svg.visible(" \n\t") == "␣⏎⇥"
    assert svg.visible("abcdefgh") == "abcdef"


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
    drawn = svg.loss_curves([(1, losses[0]), (9, losses[1])], [(9, losses[1])], {})
    assert re.findall(r'text-anchor="end" class="">([\d.]+)<', drawn) == ticks
