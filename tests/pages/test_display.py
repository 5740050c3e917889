"""Displays for notebooks: pictures that stand alone, and colours that are readable in light and dark themes."""

import re
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from glassformer.pages.display import paint, picture
from glassformer.pages.page import TEMPLATES
from glassformer.pages.svg import attention_map
from tests.pages.hostile import HOSTILE, VISIBLE, assert_static_fragment

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in TEMPLATES.glob("display_*.html")}
WHITE, VS_CODE_DARK = "#ffffff", "#1e1e1e"


def test_a_picture_contains_its_svg_unchanged_and_describes_it():
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><text x="1">50 % é 😀 &amp; {"x" * 50} #1</text></svg>'
    ((_, given),) = assert_static_fragment(picture(svg, HOSTILE, 300)).tags
    assert unquote(given["src"].partition(",")[2]) == svg
    assert given["alt"] == VISIBLE
    assert given["width"] == "300"


def test_a_painted_figure_has_its_styles_and_a_background():
    drawn = paint(attention_map([[1.0, 0.5], [0.5, 1.0]], "t", labels=["a", "b"], mark_future=True))
    root = ElementTree.fromstring(drawn)
    assert "--paper" in root[0].text
    assert {element.get("class") for element in root.iter()} >= {"cells", "cells future"}
    assert_static_fragment(picture(drawn, "t", 100))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_is_that_of_the_standard():
    assert contrast("#000000", WHITE) == pytest.approx(21)
    assert contrast("#777777", WHITE) == pytest.approx(4.48, abs=0.01)


def test_every_colour_is_readable_on_white_and_on_black():
    """No colour can have more than 4.1 with both; text that is bold needs 3."""
    colours = set(re.findall(r"(?:color:|background:|\")(#[0-9a-f]{6})\b", "".join(TEXTS.values())))
    assert len(colours) >= 3
    for colour in colours:
        assert min(contrast(colour, WHITE), contrast(colour, VS_CODE_DARK)) > 3.7, colour


@pytest.mark.parametrize("name", TEXTS)
def test_no_display_has_a_background_for_its_text_or_a_name_that_could_clash(name):
    assert not re.search(r"<style|\bclass=|\bid=|<table[^>]*background|<td[^>]*background", TEXTS[name])
