"""Position pictures: positions down, zero in the middle of the colours, one line per head."""

import numpy as np
import pytest

from glassformer.lens.figures import FigureError, position_heatmap, relative_offset


def test_positions_run_down_and_colours_are_centred():
    vectors = np.array([[0.5, -2.0, 0.0], [1.0, 0.0, 0.0]])
    ax = position_heatmap(vectors).axes[0]
    assert np.array_equal(np.asarray(ax.images[0].get_array()), vectors)
    assert ax.images[0].get_clim() == (-2, 2)
    assert ax.get_ylim() == (1.5, -0.5)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("component", "position")


def test_one_panel_per_scheme_and_one_line_per_head():
    offsets = np.arange(-3, 4)
    figure = relative_offset(offsets, {"one": offsets**2.0, "heads": np.stack([offsets, 2 * offsets])})
    one, heads = figure.axes
    assert [ax.get_title() for ax in figure.axes] == ["one", "heads"]
    assert one.lines[0].get_ydata().tolist() == (offsets**2).tolist()
    assert len(heads.lines) == 3  # and zero
    assert [text.get_text() for text in heads.get_legend().get_texts()] == ["head 0", "head 1"]


def test_curves_must_fit_their_offsets():
    with pytest.raises(FigureError, match="3 values for 2 offsets"):
        relative_offset([0, 1], {"one": np.zeros(3)})
    with pytest.raises(FigureError, match="pass at least one"):
        relative_offset([0, 1], {})
