"""Tokens become drawable words, labels thin out by round steps, cells hold text only where it fits."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import font_manager

from glassformer.lens.figures import FigureError
from glassformer.lens.figures import labels as t

FONT = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()


@given(st.text(max_size=40))
def test_whatever_a_token_holds_the_font_can_draw_it_within_the_length(token):
    shown = t.readable(token)
    plain = shown.replace(r"\$", "$")
    assert all(ord(character) in FONT for character in plain)
    assert len(plain) <= max(t.LONGEST, 9)  # one code point may stand alone: U+10FFFF and an ellipsis
    assert bool(plain) == bool(token)
    assert shown.count("$") == shown.count(r"\$")


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" the", "␣the"),
        ("\n", "⏎"),
        ("\t", "⇥"),
        ("猫", "U+732B"),
        ("\x00", "U+0000"),
        ("\u200b", "U+200B"),
        ("é", "é"),
    ],
)
def test_blanks_are_visible_and_what_cannot_be_drawn_is_its_code_point(token, shown):
    assert t.readable(token) == shown


def test_a_long_token_is_cut_with_an_ellipsis():
    assert t.readable(" antidisestablishment") == "␣antidisest…"
    assert t.readable("a" * 12) == "a" * 12
    assert t.readable("猫が座った") == "U+732B…"


def test_names_keep_their_spaces():
    assert t.wording("previous token") == "previous token"


@given(st.integers(1, 5000), st.integers(1, 200))
def test_the_stride_is_the_least_round_one(n, most):
    step = t.stride(n, most)
    assert -(-n // step) <= most
    smaller = [s * 10**p for p in range(4) for s in (1, 2, 5) if s * 10**p < step]
    assert all(-(-n // s) > most for s in smaller)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.974, ".97"), (-0.5, "−.50"), (0.0, ".00"), (-0.001, ".00"), (0.999, "1.0"), (1.04, "1.0"), (-3.21, "−3.2")],
)
def test_numbers_in_cells_have_two_digits(value, shown):
    assert t.brief(value) == shown


def test_numbers_are_not_copied_when_they_need_not_be():
    held = torch.zeros(3)
    assert t.numbers(held).dtype == np.float32
    assert np.shares_memory(t.numbers(held), held.numpy())
    assert t.numbers(torch.zeros(3, dtype=torch.bfloat16)).dtype == np.float32
    assert t.numbers([1, 2]).dtype == np.float64


def heat(rows: int, columns: int):
    with t.titled("cells") as figure:
        ax = figure.canvas.subplots()
        image = ax.imshow(np.linspace(0, 1, rows * columns).reshape(rows, columns), aspect="auto")
    figure.canvas.draw_without_rendering()
    return figure, ax, image


def test_text_is_written_where_it_fits_in_the_colour_of_most_contrast():
    figure, ax, image = heat(3, 4)
    assert t.write_cells(figure, ax, image, [["0.12"] * 4] * 3)
    assert len(ax.texts) == 12
    assert [text.get_color() for text in (ax.texts[0], ax.texts[-1])] == ["white", "black"]  # dark blue, yellow
    width = ax.get_window_extent().width / 4
    assert all(text.get_window_extent().width <= width for text in ax.texts)


def test_numbers_that_do_not_fit_are_left_out_and_words_are_shortened():
    figure, ax, image = heat(3, 60)
    assert not t.write_cells(figure, ax, image, [["0.12"] * 60] * 3)
    assert not ax.texts
    figure, ax, image = heat(3, 12)
    assert t.write_cells(figure, ax, image, [["antidisestablishment"] * 12] * 3, shorten=True)
    assert {text.get_text()[-1] for text in ax.texts} == {"…"}
    width = ax.get_window_extent().width / 12
    assert all(text.get_window_extent().width <= width for text in ax.texts)


def test_a_long_title_is_broken_evenly():
    with t.titled("word " * 40) as figure:
        lines = figure.canvas.get_suptitle().split("\n")
    assert len(lines) > 1
    assert max(map(len, lines)) - min(map(len, lines)) <= 10
    assert not plt.get_fignums()


def test_what_cannot_be_drawn_is_refused_in_one_sentence():
    with pytest.raises(FigureError, match="2 values that are NaN or infinite"):
        t.finite("the map", np.array([1.0, np.nan, np.inf]))
    with pytest.raises(FigureError, match="is empty"):
        t.finite("the map", np.zeros((0, 3)))
    with pytest.raises(FigureError, match="2 labels for 3 keys"):
        t.named("keys", ["a", "b"], 3)
