"""Figures over the depth of a model: singular values, rank collapse and norm of the residual stream."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
from torch import Tensor

from glassformer.lens.figure import AMOUNT, COLOURS, GREY, Figure, FigureError
from glassformer.lens.figures.labels import finite, numbers, stride, titled, wording
from glassformer.shapes import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = Tensor | np.ndarray
SHADES = 0.92
"""The yellow end of the colour map is left out: a thin yellow line is invisible on white."""


def singular_values(
    spectra: Float[Array, "L R"],
    depths: Sequence[int] | None = None,
    *,
    title: str = "Singular values of the residual stream at each depth",
) -> Figure:
    """Draw one curve per depth, divided by its largest value. A steeper curve is closer to rank one."""
    values = finite("the singular values", numbers(spectra)).astype(np.float64)
    if values.min() < 0 or (values[:, 0] <= 0).any():
        raise FigureError("singular values are at least 0 and the first is above 0: pass them in decreasing order.")
    depths = list(range(len(values)) if depths is None else depths)
    relative = values / values[:, :1]
    floor = 1e-14  # smaller values are rounding errors
    shades = mpl.colormaps[AMOUNT]
    norm = Normalize(min(depths), max(max(depths), min(depths) + 1))
    with titled(title, height=3.4) as figure:
        ax = figure.canvas.subplots()
        index = np.arange(1, values.shape[1] + 1)
        for depth, row in zip(depths, relative, strict=True):
            shown = np.where(row > floor, row, np.nan)
            mark = "o" if values.shape[1] == 1 else None
            ax.plot(index, shown, color=shades(SHADES * norm(depth)), linewidth=1.1, marker=mark)
        log_axis(ax)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.set_xlabel("index of the singular value")
        ax.set_ylabel("σ / largest σ")
        thin = shades.resampled(256)(np.linspace(0, SHADES, 256))
        mappable = ScalarMappable(norm, mpl.colors.ListedColormap(thin))
        bar = figure.canvas.colorbar(mappable, ax=ax, label="blocks passed", fraction=0.04, aspect=28, pad=0.02)
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def log_axis(ax: "Axes") -> None:
    """Make the y axis logarithmic with at most nine ticks, at powers of ten."""
    ax.set_yscale("log")
    low, high = (math.log10(end) for end in ax.get_ylim())
    decades = math.floor(high) - math.ceil(low) + 1
    if decades >= 2:
        step = stride(decades, 8)
        powers = range(step * math.ceil(low / step), math.floor(high) + 1, step)
        ax.yaxis.set_major_locator(FixedLocator([10.0**power for power in powers]))
        ax.yaxis.set_minor_locator(NullLocator())


def deviation_by_depth(
    curves: Mapping[str, Float[Array, "L"]],
    theory: Mapping[str, Float[Array, "L"]] | None = None,
    *,
    title: str = "Distance of the token vectors from their mean, by depth",
    label: str = "|X − 1·mean| / |X|",
) -> Figure:
    """Draw one line per variant of the network, layer 0 first, and predictions of the theory as dotted lines.

    The axis is logarithmic if the values need it. It cannot show zeros (token vectors equal up to rounding): a line
    ends where it reaches zero.
    """
    if not curves:
        raise FigureError("no curves were given: pass at least one.")
    with titled(title, height=3.9) as figure:
        ax = figure.canvas.subplots()
        lines = [_above_zero(name, line) for name, line in curves.items()]
        for i, (name, shown) in enumerate(zip(curves, lines, strict=True)):
            drawn = {"color": COLOURS[i % 7], "marker": ".", "markersize": 3, **_seen(i, lines)}
            ax.plot(shown, label=wording(name, 40), **drawn)
        for i, (name, line) in enumerate((theory or {}).items()):
            grey = ("black", GREY, "#999999")[i % 3]
            ax.plot(
                _above_zero(name, line), color=grey, linestyle=":", linewidth=2, label=f"theory: {wording(name, 40)}"
            )
        shown = np.concatenate([line.get_ydata() for line in ax.lines])
        ended = bool(np.isnan(shown).any())
        if np.nanmin(shown) < 0.05 * np.nanmax(shown):
            log_axis(ax)
        else:
            ax.set_ylim(0, 1.05 * np.nanmax(shown))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        ax.set_xlabel("layer (a line ends where the token vectors are equal up to rounding)" if ended else "layer")
        ax.set_ylabel(label)
        # outside the axes, where it covers no curve
        figure.canvas.legend(loc="outside lower center", ncols=2, fontsize=7.5)
    return figure


def _above_zero(name: str, line: Float[Array, "L"]) -> np.ndarray:
    values = finite(name, numbers(line)).astype(np.float64)
    return np.where(values > 0, values, np.nan)


def _seen(i: int, lines: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return a style for line i that keeps lines visible which coincide.

    Dashed lines lie on solid ones and later lines on earlier ones; a line with others on it is wider.
    """
    above = [j for j in range(len(lines)) if (j % 3, j) > (i % 3, i) and _coincide(lines[i], lines[j])]
    return {
        "linestyle": ("-", "--", "-.")[i % 3],
        "linewidth": 1.5 * (1 + len(above)),
        "zorder": 2 + i % 3 / 10 + i / 1000,
    }


def _coincide(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two lines are within 2 % of each other in at least half of their points."""
    shorter = min(len(a), len(b))
    a, b = a[:shorter], b[:shorter]
    return bool((np.abs(a - b) <= 0.02 * np.maximum(a, b)).mean() >= 0.5)


def norms_by_depth(
    norms: Mapping[str, Float[Array, "L T"] | Float[Array, "L"]],
    *,
    title: str = "Norm of the residual stream, by depth",
) -> Figure:
    """Draw the median norm over positions and the band of the middle half, one colour per series.

    A series that is shorter than the longest ends at the same depth: the output of block I is at depth I + 1.
    """
    if not norms:
        raise FigureError("no norms were given: pass at least one.")
    with titled(title, height=3.4) as figure:
        ax = figure.canvas.subplots()
        largest, smallest = 0.0, np.inf
        deepest = max(len(given) for given in norms.values())
        for i, (name, given) in enumerate(norms.items()):
            values = finite(name, numbers(given)).astype(np.float64)
            values = values[:, None] if values.ndim == 1 else values
            low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], axis=1)
            depths = np.arange(deepest - len(values), deepest)
            colour = COLOURS[i % 7]
            ax.plot(depths, middle, color=colour, label=wording(name, 40), marker=".", markersize=4)
            if values.shape[1] > 1:
                ax.fill_between(depths, low, high, color=colour, alpha=0.2, linewidth=0)
            largest, smallest = max(largest, float(high.max())), min(smallest, float(low.min()))
        if smallest > 0 and largest / smallest > 50:
            log_axis(ax)
        else:
            ax.set_ylim(0, largest * 1.05 or 1.0)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("blocks passed")
        ax.set_ylabel("norm (median, middle half of the positions)")
        if len(norms) > 1:
            figure.canvas.legend(loc="outside lower center", ncols=3, fontsize=7.5)
    return figure
