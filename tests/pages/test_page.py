"""The page writer escapes everything, and its templates contain nothing that would undo that."""

import re
import tomllib
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from glassformer.pages.page import TEMPLATES, clean, environment, render
from tests.pages.hostile import HOSTILE, VISIBLE, read

ROOT = Path(__file__).parents[2]
FILES = sorted(TEMPLATES.iterdir())


def rendered(source: str, **context) -> str:
    return environment().from_string(source).render(**context)


def test_values_are_escaped_in_text_and_attributes():
    page = clean(rendered('<p title="{{ word }}">{{ word }}</p>', word=HOSTILE))
    reader = read(page)
    assert [tag for tag, _ in reader.tags] == ["p"]
    assert reader.tags[0][1]["title"] == VISIBLE
    assert "".join(reader.text) == VISIBLE


def test_markup_is_inserted_as_it_is_and_a_missing_value_is_an_error():
    assert rendered("{{ word }}", word=Markup("<b>x</b>")) == "<b>x</b>"
    with pytest.raises(UndefinedError, match="word"):
        rendered("{{ word }}")


def test_clean_keeps_text_and_replaces_what_xml_forbids():
    assert clean("a\t\n\r é 😀 \ufffd") == "a\t\n\r é 😀 \ufffd"
    assert clean("\x00\x0b\x1f\ud800\udfff\ufffe") == "\ufffd" * 6


def test_a_rendered_page_can_always_be_encoded(monkeypatch):
    from types import SimpleNamespace

    report = SimpleNamespace(
        subject="\ud800", healthy=True, verdict=lambda: "\x00", diagnoses=(), findings=(), notes=()
    )
    page = render("doctor.html", report=report, leak_map="")
    assert page.encode("utf-8").count("\ufffd".encode()) == 3
    assert page.startswith("<!doctype html>")
    assert page.endswith("</html>\n")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_template_undoes_the_escaping(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\|\s*safe\b|autoescape|<script|javascript:|\bon\w+=|https?:|@import|url\(", text)
    assert not re.search(r"=\{\{|=\s*[^\"'>\s{]*\{\{", text)  # an attribute value without quotes is not escaped enough
    for block in re.findall(r"<style>.*?</style>|\{% block style %\}.*?\{% endblock %\}", text, re.S):
        assert "{{" not in block  # escaping for HTML is not escaping for CSS
    assert path.suffix != ".css" or "{" + "{" not in text


def test_every_template_is_packaged():
    """A wheel contains only the data files that pyproject.toml lists."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["glassformer"]
    package = ROOT / "src" / "glassformer"
    packaged = {path for pattern in patterns for path in package.glob(pattern)}
    assert len(FILES) >= 6
    assert set(FILES) <= packaged
