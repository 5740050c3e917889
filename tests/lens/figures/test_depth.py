"""Curves against depth: relative spectra, lines that end at zero, branches next to the stream they write to."""

import matplotlib as mpl
import numpy as np
import pytest

from glassformer.lens.figure import COLOURS
from glassformer.lens.figures import FigureError, deviation_by_depth, norms_by_depth, singular_values
from tests.lens.figures.cases import drawn


def test_spectra_are_relative_and_end_at_rounding():
    ax = singular_values(np.array([[4.0, 2.0, 1.0], [10.0, 1.0, 1e-16]])).axes[0]
    first, second = (np.asarray(line.get_ydata()) for line in ax.lines)
    assert first.tolist() == [1, 0.5, 0.25]
    assert second[:2].tolist() == [1, 0.1]
    assert np.isnan(second[2])
    assert ax.get_yscale() == "log"
    with pytest.raises(FigureError, match="at least 0"):
        singular_values(np.array([[1.0, -1.0]]))


def test_a_line_ends_where_the_rows_are_equal_and_theory_is_dotted():
    figure = deviation_by_depth(
        {"attention": np.array([1.0, 1e-3, 0.0, 0.0])}, {"cubic": np.array([1.0, 1e-2, 1e-6, 0.0])}
    )
    ax = figure.axes[0]
    measured, theory = ax.lines
    assert np.isnan(measured.get_ydata()).tolist() == [False, False, True, True]
    assert theory.get_linestyle() == ":"
    assert "a line ends" in ax.get_xlabel()
    legend = [text.get_text() for text in figure.canvas.legends[0].get_texts()]
    assert legend == ["attention", "theory: cubic"]


def test_the_axis_is_logarithmic_only_when_values_need_it():
    assert drawn("deviation of one").axes[0].get_yscale() == "linear"
    ax = drawn("deviation of nine variants").axes[0]
    assert ax.get_yscale() == "log"
    inside = [tick for tick in ax.get_yticks() if ax.get_ylim()[0] <= tick <= ax.get_ylim()[1]]
    assert 3 <= len(inside) <= 9


@pytest.mark.parametrize("pairs", [[(0, 3), (1, 6), (2, 5)], [(0, 1), (2, 4), (3, 6)]], ids=str)
def test_lines_that_coincide_are_all_seen(pairs):
    heights = {i: 1 - 0.2 * level for level, pair in enumerate(pairs) for i in pair}
    figure = deviation_by_depth({str(i): np.full(31, heights.get(i, 0.3)) for i in range(7)})
    figure.canvas.canvas.draw()
    pixels = np.asarray(figure.canvas.canvas.buffer_rgba())[::-1, :, :3].astype(int)  # rows from below
    ax = figure.axes[0]
    for pair in pairs:
        (left, row), (right, _) = ax.transData.transform([(0, heights[pair[0]]), (30, heights[pair[0]])]).astype(int)
        band = pixels[row - 4 : row + 5, left:right]
        for i in pair:
            near = np.abs(band - np.array(mpl.colors.to_rgb(COLOURS[i])) * 255).max(-1) < 40
            assert near.any(0).mean() > 0.1, f"{i} is hidden at {heights[i]}"


def test_only_a_line_that_another_would_hide_is_wider():
    ones, half = np.ones(9), np.full(9, 0.5)
    lines = deviation_by_depth({"a": ones, "b": half, "c": 0.6 * ones, "d": ones, "e": 0.9 * ones}).axes[0].lines
    assert [line.get_linewidth() for line in lines] == [3.0, 1.5, 1.5, 1.5, 1.5]


def test_norms_show_the_median_and_the_output_of_a_block_is_drawn_after_it():
    stream = np.arange(12.0).reshape(4, 3)
    figure = norms_by_depth({"stream": stream, "attention": np.ones((3, 3))})
    first, second = figure.axes[0].lines
    assert first.get_ydata().tolist() == [1, 4, 7, 10]
    assert list(second.get_xdata()) == [1, 2, 3]


@pytest.mark.parametrize("draw", [norms_by_depth, deviation_by_depth])
def test_nothing_to_draw_is_one_sentence(draw):
    with pytest.raises(FigureError, match="pass at least one"):
        draw({})
