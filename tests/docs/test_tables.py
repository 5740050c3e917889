"""Tables, lists and printed outputs of the documentation are whole."""

import contextlib
import io
import itertools
import re
import shlex

import pytest

from glassformer.cli import main
from tests.docs.blocks import FILES, PAGES, ROOT, blocks

RULE = re.compile(r"\s*\|(?:\s*:?-+:?\s*\|)+\s*$")


def outside_of_blocks(text):
    """Return the lines of a page, with those of fenced blocks empty."""
    found, fenced = [], False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        fenced = fenced != fence
        found.append("" if fenced or fence else line)
    return found


def broken_rows(text):
    """Yield the rows of tables that have another number of cells than the head of their table."""
    lines = outside_of_blocks(text)

    def bars(line):
        return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", line)))

    for number, line in enumerate(lines):
        if number and RULE.match(line):
            rest = lines[number + 1 :]
            end = next((n for n, row in enumerate(rest) if not row.strip()), len(rest))
            for row in rest[:end]:
                if not row.lstrip().startswith("|") or bars(row) != bars(lines[number - 1]):
                    yield row


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_row_of_a_table_has_as_many_cells_as_its_head(path):
    assert list(broken_rows(path.read_text(encoding="utf-8"))) == []


def test_a_row_that_was_wrapped_is_found():
    table = "| a | b |\n|---|---|\n| 1 | `x|y` |\n"
    assert list(broken_rows(table)) == []
    assert list(broken_rows(table + "| 2 | 3\nrest | | 4 | 5 |\n")) == ["| 2 | 3", "rest | | 4 | 5 |"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_item_of_a_list_is_inside_another_line(path):
    if path.name == "run_file.md":  # its formulas contain products
        return
    assert [
        line for line in outside_of_blocks(path.read_text(encoding="utf-8")) if re.search(r"\w\. \* [A-Z]", line)
    ] == []


def sized(path):
    """Yield the commands of a page that need no model, each with the output that is printed after it."""
    found = blocks(path.read_text(encoding="utf-8"))
    for before, after in itertools.pairwise(found):
        words = shlex.split(before.text)
        if before.language == "sh" and after.language == "text" and words[:2] == ["glass", "size"]:
            yield words[1:], after.text


OUTPUTS = [pytest.param(words, text, id=" ".join(words)) for words, text in
           sized(ROOT / "docs" / "tutorials" / "size_and_plan.md")]  # fmt: skip


@pytest.mark.parametrize(("words", "text"), OUTPUTS)
def test_the_outputs_of_the_tutorial_about_sizes_are_printed(words, text):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words) == 0
    for line in text.splitlines():
        assert line == "..." or line in out.getvalue().splitlines(), line


def test_there_are_outputs():
    assert len(OUTPUTS) == 3
