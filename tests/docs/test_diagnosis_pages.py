"""docs/diagnoses: one page for each name that the doctor gives, with its sections, and findings that exist."""

import ast
import re

import pytest

from glassformer.doctor.causes import RANK
from glassformer.doctor.report import TITLES
from tests.docs.blocks import ROOT, blocks

FOLDER = ROOT / "docs" / "diagnoses"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
INDEX = PAGES.pop("index")
SECTIONS = [
    "Symptom",
    "Cause",
    "Broken and fixed",
    "How the doctor detects it",
    "How to fix it",
    "Real cases",
    "What looks like it but is not",
    "Try it",
]
PROBES = "\n".join(path.read_text() for path in sorted((ROOT / "src/glassformer/doctor").rglob("*.py")))
LITERALS = set(re.findall(r'"([a-z_]+/[\w-]*)[{"]', PROBES))
"""Ids of findings in the source; one that ends in `-` or `/` is the start of an f-string."""
ENDINGS = {literal.partition("/")[2] for literal in LITERALS} | set(re.findall(r'"([\w-]+)"', PROBES))


def exists(id: str) -> bool:
    """Whether a probe can make a finding with this id: a literal, a start and an ending, or two strings."""
    if id in LITERALS or any(id.startswith(start) for start in LITERALS if start.endswith("-")):
        return True
    name, ending = id.split("/")
    dtypes = ("float32", "bfloat16", "float16")
    return ending in ENDINGS or (name == "mask_nan" and ending.removesuffix("-padded") in dtypes)


def ids_of(text: str) -> list[str]:
    return [id for id in re.findall(r"`([a-z_]+/[\w-]+)`", text) if id.split("/")[0] in RANK]


def test_the_check_of_ids_can_fail():
    assert exists("causal_leak/future-token")
    assert exists("pad_leak/content-left")
    assert not exists("causal_leak/telepathy")


def test_there_is_one_page_for_each_diagnosis():
    assert sorted(PAGES) == sorted(RANK)


def test_the_index_links_every_page_with_its_headline():
    linked = re.findall(r"^\| \[(\w+)\]\((\w+)\.md\) \| (.+)\. \|$", INDEX, re.MULTILINE)
    assert all(name == target for name, target, _ in linked)
    assert {name: title.lower() for name, _, title in linked} == {n: t.lower() for n, t in TITLES.items()}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_sections_and_says_something_in_each(name):
    text = PAGES[name]
    title, headline = text.splitlines()[0:3:2]
    assert title == f"# {name}"
    assert headline.strip("*.").lower() == TITLES[name].lower()
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    assert parts[::2] == SECTIONS
    assert all(len(body.split()) >= 3 for body in parts[1::2])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_findings_that_the_probes_make(name):
    named = ids_of(PAGES[name])
    assert f"{name}/" in {id.split("/")[0] + "/" for id in named}
    assert not [id for id in named if not exists(id)]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_a_broken_and_a_fixed_snippet(name):
    python = [block.text for block in blocks(PAGES[name]) if block.language == "python"]
    assert len(python) == 2
    assert ast.dump(ast.parse(python[0])) != ast.dump(ast.parse(python[1]))
