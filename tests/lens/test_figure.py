"""Pictures are written whole in four formats, are the same bytes each time, and refuse what cannot be written."""

import xml.etree.ElementTree as ElementTree

import matplotlib.pyplot as plt
import pytest

from glassformer.lens.figure import FORMATS, FigureError, drawing
from tests.pages.hostile import assert_self_contained

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF", "html": b"<!doctype html>"}


def picture(title="A line"):
    with drawing(title) as figure:
        ax = figure.canvas.subplots()
        ax.plot([0, 1, 2], [1.0, 4.0, 9.0])
        ax.set_xlabel("step")
    return figure


@pytest.mark.sample(2)
@pytest.mark.parametrize("format", FORMATS)
def test_each_format_is_written_and_is_the_same_bytes_again(tmp_path, format):
    first = picture().save(tmp_path / f"a.{format}").read_bytes()
    assert first.startswith(MAGIC[format])
    assert picture().save(tmp_path / "deeper" / f"b.{format}").read_bytes() == first


def test_the_svg_is_wellformed_keeps_text_as_text_and_escapes_the_title():
    figure = picture("a < b & c")
    tree = ElementTree.fromstring(figure.svg())
    assert tree.tag.endswith("svg")
    assert "step" in figure.svg()
    assert "<title>a &lt; b &amp; c</title>" in figure.html()
    assert figure._repr_svg_() == figure.svg()


def test_the_page_is_self_contained():
    assert_self_contained(picture("</title><script>x()</script>").html())


@pytest.mark.parametrize("name", ["picture.bmp", "picture", "picture.svgz"])
def test_an_unknown_format_is_one_sentence_naming_those_that_work(tmp_path, name):
    with pytest.raises(FigureError, match=r"use one of \.png, \.svg, \.pdf, \.html"):
        picture().save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FigureError, match="cannot be written"):
        picture().save(tmp_path / "file" / "picture.png")


def test_drawing_leaves_the_users_settings_and_pyplot_alone():
    before = dict(plt.rcParams)
    picture()
    assert dict(plt.rcParams) == before
    assert not plt.get_fignums()
