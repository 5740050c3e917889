"""What does not fit stands below, nothing is lost, and columns stay aligned."""

from hypothesis import given
from hypothesis import strategies as st

from glassformer.sizing.layout import MARGIN, columns, with_note, wrap

ROWS = [("name", "count", "share"), ("a", "1,000", "3%"), ("a longer one", "9", "100%")]


def test_a_paragraph_is_broken_only_where_it_must_be():
    text = "  one two\n  three four"
    assert wrap(text, None) == wrap(text, 12) == text
    assert wrap(text, 11, "  ") == "  one two\n  three\n  four"
    assert wrap("", 3) == ""


@given(st.lists(st.text("abc-", min_size=1, max_size=9), max_size=20), st.integers(12, 60))
def test_every_word_of_a_paragraph_is_kept_and_no_line_is_too_long(words, width):
    made = wrap(" ".join(words), width, "  ")
    assert made.split() == words
    assert all(len(line) <= width for line in made.splitlines())


def test_a_note_is_next_to_its_numbers_or_below_them():
    assert with_note("  a  1", "of two", None) == with_note("  a  1", "of two", 15) == "  a  1   of two"
    assert with_note("  a  1", "of two", 14) == f"  a  1\n{MARGIN}of two"
    assert with_note("  a  1", "", 6) == "  a  1"


def test_columns_are_as_wide_as_their_widest_cell_names_to_the_left():
    assert columns(ROWS, None) == [
        "  name          count  share",
        "  a             1,000     3%",
        "  a longer one      9   100%",
    ]
    assert columns(ROWS, 28) == columns(ROWS, None)


def test_columns_that_do_not_fit_stand_below_in_every_row():
    assert columns(ROWS, 27) == [
        "  name          count\n      share",
        "  a             1,000\n         3%",
        "  a longer one      9\n       100%",
    ]
    assert columns(ROWS, 17)[0] == "  name\n      count\n      share"  # the last two together would reach 18
    assert columns(ROWS, 18)[0] == "  name\n      count  share"
