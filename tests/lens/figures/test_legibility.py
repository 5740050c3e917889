"""Every figure, small and large: nothing is clipped, nothing overlaps, nothing is drawn as an empty box."""

import pytest

from glassformer.lens.figure import drawing
from tests.lens.figures.cases import CASES, drawn
from tests.lens.figures.legible import problems

LARGER = ("sheet of 1200 heads", "scores of 1024 heads", "head at 2000 tokens", "induction at 300 tokens")
"""Than another large case of the same figure."""


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGER)) for name in CASES])
def test_no_text_is_clipped_or_on_another_and_title_and_axes_are_named_on_a_picture_that_fits_a_page(name):
    figure = drawn(name)  # once for all of this: drawing is what takes the time
    assert not problems(figure)
    assert figure.title in figure.canvas.get_suptitle().replace("\n", " ").replace(r"\$", "$")
    assert figure.canvas.get_figwidth() == 6.3
    assert figure.canvas.get_figheight() <= 9.1
    bars = [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]
    panels = [ax for ax in figure.axes if ax not in bars and ax.axison]
    assert all(ax.get_ylabel() for ax in bars)
    assert any(ax.get_xlabel() for ax in panels) or figure.canvas.get_supxlabel() or "keys (right)" in figure.title
    words = any(ax.get_ylabel() for ax in panels) or any(t.get_text().isalpha() for t in panels[0].get_yticklabels())
    assert words or figure.canvas.get_supylabel() or "queries (down)" in figure.title


def test_the_measure_finds_overlapping_ticks_and_clipped_text():
    with drawing("a") as figure:
        ax = figure.canvas.subplots()
        ax.set_xticks([0.50, 0.501], ["one long label", "another long label"])
        figure.canvas.text(0.99, 0.5, "out of the picture")
    found = problems(figure)
    assert any("overlap" in line for line in found)
    assert any("outside" in line for line in found)
