"""Figures of positions: the vectors that are added, and how a score depends on the distance of two tokens."""

import math
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from glassformer.lens.figure import AMOUNT, COLOURS, Figure, FigureError
from glassformer.lens.figures.attention import draw_map
from glassformer.lens.figures.labels import finite, numbers, titled, wording
from glassformer.shapes import Float, Shaped

Array = Tensor | np.ndarray


def position_heatmap(vectors: Float[Array, "T D"], *, title: str = "Position vectors: one row per position") -> Figure:
    """Draw position vectors: positions down, components to the right, colours centred on zero."""
    values = finite("the position vectors", numbers(vectors))
    reach = float(np.abs(values).max()) or 1.0
    with titled(title, height=4.2) as figure:
        ax = figure.canvas.subplots()
        image = draw_map(ax, values, -reach, reach, aspect="auto")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
        ax.set_xlabel("component")
        ax.set_ylabel("position")
        bar = figure.canvas.colorbar(image, ax=ax, label="value", fraction=0.04, aspect=28, pad=0.02)
        bar.outline.set_visible(False)
    return figure


def relative_offset(
    offsets: Sequence[int] | Shaped[Array, "N"],
    curves: Mapping[str, Shaped[Array, "N"] | Shaped[Array, "H N"]],
    *,
    xlabel: str = "offset: key position − query position",
    ylabel: str = "value",
    title: str = "How a score depends on the distance between two tokens",
) -> Figure:
    """Draw one panel per scheme, each on its own scale. A scheme that differs between heads has one line per head."""
    if not curves:
        raise FigureError("no curves were given: pass at least one.")
    x = numbers(offsets)
    columns = 1 if len(curves) == 1 else 2
    rows = math.ceil(len(curves) / columns)
    with titled(title, height=3.2 if rows == 1 else 0.5 + 2.1 * rows) as figure:
        axes = figure.canvas.subplots(rows, columns, squeeze=False, sharex=True).ravel()
        for ax in axes[len(curves) :]:
            ax.set_axis_off()
        for ax, (name, given) in zip(axes, curves.items(), strict=False):
            lines = np.atleast_2d(finite(name, numbers(given)))
            if lines.shape[1] != len(x):
                raise FigureError(f"{name} has {lines.shape[1]} values for {len(x)} offsets: pass one for each.")
            shades = mpl.colormaps[AMOUNT](np.linspace(0, 0.9, len(lines)))
            for h, line in enumerate(lines):
                ends = f"head {h}" if len(lines) > 1 and h in (0, len(lines) - 1) else None
                colour = COLOURS[0] if len(lines) == 1 else shades[h]
                ax.plot(x, line, color=colour, linewidth=1.2, label=ends)
            ax.set_title(wording(name, 48))
            ax.axhline(0, color="black", linewidth=0.4)
            if len(lines) > 1:
                ax.legend(fontsize=7, loc="best", frameon=True, framealpha=0.85, edgecolor="none")
        figure.canvas.supxlabel(xlabel, fontsize=9)
        figure.canvas.supylabel(ylabel, fontsize=9)
    return figure
