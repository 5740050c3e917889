"""Every relative link of README.md, CONTRIBUTING.md and docs/ leads to a file, and to a heading where it names one."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks import FILES, ROOT, blocks

LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    for block in blocks(text):
        text = text.replace(block.text, "", 1)
    return re.sub(r"`[^`\n]*`", "", text)


def headings(text: str) -> set[str]:
    """The anchors that code hosts and Sphinx make of headings."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


def broken(path: Path, text: str) -> list[str]:
    found = []
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        named = anchor and file.suffix == ".md"
        if not file.exists() or (named and anchor not in headings(file.read_text(encoding="utf-8"))):
            found.append(link)
    return found


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# A title\n")
    text = "[a](no.md) [b](there.md) [c](there.md#a-title) [d](there.md#no) [e](https://example.org) `[f](no.md)`\n"
    assert broken(tmp_path / "page.md", text) == ["no.md", "there.md#no"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(path):
    assert not broken(path, path.read_text(encoding="utf-8"))
