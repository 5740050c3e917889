"""Grids show what they were given, bars always sum to what is written, patches are centred on zero."""

import numpy as np
import pytest

from glassformer.lens.figures import FigureError, attribution_bars, logit_lens_grid, patching_map
from tests.lens.figures.cases import drawn, words


def test_the_lens_shows_values_and_tokens_depth_down():
    values = np.array([[0.1, 0.9], [0.5, 0.2], [0.3, 0.4]])
    top = [["a", " b"], ["c", "d"], ["e", "f"]]
    ax = logit_lens_grid(top, values, ["x", "y"], ["embedding", "block 0", "block 1"]).axes[0]
    assert np.array_equal(np.asarray(ax.images[0].get_array()), values)
    assert [text.get_text() for text in ax.texts] == ["a", "␣b", "c", "d", "e", "f"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["embedding", "block 0", "block 1"]
    assert ax.get_ylim() == (2.5, -0.5)
    assert ax.images[0].get_clim() == (0, 1)


def test_cells_too_small_for_words_show_colour_alone():
    assert not drawn("lens at 512 tokens").axes[0].texts
    assert len(drawn("lens at 12 tokens").axes[0].texts) == 13 * 12


def test_tokens_that_do_not_fit_the_grid_are_refused():
    with pytest.raises(FigureError, match="2 depths by 3 positions"):
        logit_lens_grid([["a"] * 3], np.zeros((2, 3)), ["x"] * 3)


def bars(figure):
    ax = figure.axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    return dict(zip(names, [bar.get_width() for bar in ax.patches], strict=True))


@pytest.mark.parametrize("order", ["size", "depth"])
@pytest.mark.parametrize("count", [3, 24, 25, 157])
def test_the_bars_sum_to_the_last_one(order, count):
    values = np.random.default_rng(count).normal(size=count)
    drawn_bars = bars(attribution_bars([f"part {i}" for i in range(count)], values, values.sum(), order=order))
    total = drawn_bars.pop("sum")
    assert total == pytest.approx(values.sum())
    assert sum(drawn_bars.values()) == pytest.approx(total)
    assert len(drawn_bars) == min(count, 25)


def test_by_size_the_largest_comes_first_and_by_depth_parts_keep_their_order():
    names, values = ["a", "b", "c"], np.array([0.1, -3.0, 2.0])
    assert list(bars(attribution_bars(names, values, -0.9))) == ["b", "c", "a", "sum"]
    assert list(bars(attribution_bars(names, values, -0.9, order="depth"))) == ["a", "b", "c", "sum"]


def test_a_sum_that_misses_the_model_is_written_out():
    figure = attribution_bars(["a", "b"], np.array([1.0, 2.0]), 2.5)
    assert "= 5.0e−01" in figure.axes[0].get_xlabel()
    with pytest.raises(FigureError, match="1 names for 2"):
        attribution_bars(["a"], np.zeros(2), 0.0)


def test_patches_are_centred_on_zero_with_rows_down():
    effects = np.array([[0.0, -0.25, 0.1], [1.0, 0.5, 0.2]])
    ax = patching_map(effects, words(3)).axes[0]
    assert ax.images[0].get_clim() == (-1, 1)
    assert ax.images[0].get_cmap().name == "RdBu_r"  # red is positive
    assert [text.get_text() for text in ax.texts] == [".00", "−.25", ".10", "1.0", ".50", ".20"]
    assert ax.get_ylim() == (1.5, -0.5)
    assert not drawn("patching of 144 heads").axes[0].texts


def test_effects_that_are_all_zero_are_drawn():
    assert patching_map(np.zeros((2, 2))).axes[0].images[0].get_clim() == (-1, 1)
