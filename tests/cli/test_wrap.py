"""Text fits the terminal, and keeps its lines where there is none."""

import pytest

from glassformer.cli.wrap import wrapped

TEXT = "a verdict of some length that goes on and on\n  seen by probe: words and more words that do not fit   \nx"


@pytest.mark.parametrize("width", [40, 47, 80])
def test_no_line_is_wider_and_no_word_is_lost(width):
    out = wrapped(TEXT, width)
    assert max(map(len, out.splitlines())) <= width
    assert out.split() == TEXT.split()
    assert all(line == line.rstrip() for line in out.splitlines())


def test_what_continues_a_line_is_indented_further_than_the_line():
    first, second, third = wrapped("  seen by probe: words and more words that do not fit", 24).splitlines()
    assert first.startswith("  seen")
    assert second.startswith("    ")
    assert third.startswith("    ")


def test_without_a_terminal_lines_stay_and_trailing_blanks_go():
    assert wrapped(TEXT, None).splitlines() == [line.rstrip() for line in TEXT.splitlines()]


def test_a_word_wider_than_the_terminal_is_broken():
    assert max(map(len, wrapped("a" * 100, 40).splitlines())) == 40
