"""Figures of the residual stream: predictions at each depth, attribution of a logit, effects of patches."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from glassformer.lens.figure import COLOURS, GREY, WIDTH, Figure, FigureError
from glassformer.lens.figures.attention import draw_map
from glassformer.lens.figures.labels import (
    TALLEST,
    Labels,
    brief,
    finite,
    minus,
    named,
    numbers,
    place_labels,
    readable,
    settle,
    text_width,
    titled,
    wording,
    write_cells,
)
from glassformer.shapes import Float

Array = Tensor | np.ndarray


def logit_lens_grid(
    top: Sequence[Sequence[object]],
    values: Float[Array, "L T"],
    tokens: Sequence[object],
    rows: Sequence[str] | None = None,
    *,
    quantity: Literal["probability", "entropy (nats)"] = "probability",
    title: str = "Prediction of each depth at each position",
) -> Figure:
    """Draw the most likely token of the residual stream at every depth (down) and position (right).

    The colour is its probability, from 0 to 1, or the entropy of the whole distribution, from 0 to the largest. Tokens
    are written where the cell is large enough.
    """
    grid = finite("the logit lens", numbers(values))
    n, T = grid.shape
    if len(top) != n or any(len(row) != T for row in top):
        raise FigureError(f"the top tokens do not fit values of {n} depths by {T} positions: pass one for each.")
    high = 1.0 if quantity == "probability" else float(grid.max()) or 1.0
    with titled(title, height=float(np.clip(1.5 + 0.24 * n, 2.7, TALLEST))) as figure:
        ax = figure.canvas.subplots()
        image = draw_map(ax, grid, 0.0, high, aspect="auto")
        ax.set_xlabel("input token at this position")
        ax.set_ylabel("residual stream after")
        figure.canvas.colorbar(
            image, ax=ax, label=quantity,
            fraction=0.04, aspect=28, pad=0.02,
        ).outline.set_visible(False)  # fmt: skip
        place_labels(
            figure,
            Labels(ax, "x", named("positions", tokens, T), True),
            Labels(ax, "y", [str(i) for i in range(n)] if rows is None else [wording(r, 24) for r in rows]),
        )
        settle(figure)
        write_cells(figure, ax, image, [[readable(token) for token in row] for row in top], shorten=True)
    return figure


def attribution_bars(
    names: Sequence[str],
    contributions: Float[Array, "N"],
    total: float,
    *,
    order: Literal["size", "depth"] = "size",
    most: int = 24,
    what: str = "the logit",
    title: str | None = None,
) -> Figure:
    """Draw the contribution of each component to a logit (or to a difference of two), with the sum and its error.

    With `order="size"` the largest come first; with `order="depth"` components keep their order. Beyond `most` bars the
    smallest are drawn as one, so that the bars always add up to the sum.
    """
    values = finite("the attribution", numbers(contributions).astype(np.float64))
    if len(names) != len(values):
        raise FigureError(f"{len(names)} names for {len(values)} contributions: pass one for each.")
    words = [wording(name, 28) for name in names]
    largest = sorted(range(len(values)), key=lambda i: -abs(values[i]))[: most if len(values) > most else None]
    kept = largest if order == "size" else sorted(largest)
    bars = [(words[i], float(values[i])) for i in kept]
    if len(kept) < len(values):
        rest = float(values.sum() - values[kept].sum())
        bars.append((f"{len(values) - len(kept)} smaller components", rest))
    bars.append(("sum", float(values.sum())))
    gap = float(values.sum() - total)
    heading = title or f"Contributions to {what}: {minus(f'{total:.3f}')}"
    with titled(heading, height=1.15 + 0.165 * len(bars)) as figure:
        ax = figure.canvas.subplots()
        colours = [GREY if "smaller components" in w else COLOURS[0] if v >= 0 else COLOURS[1] for w, v in bars[:-1]]
        ax.barh(range(len(bars)), [v for _, v in bars], color=[*colours, COLOURS[6]], height=0.75)
        ax.set_ylim(len(bars) - 0.4, -0.6)
        ax.axvline(0, color="black", linewidth=0.6)
        ax.axhline(len(bars) - 1.5, color=GREY, linewidth=0.6)
        ax.set_yticks(range(len(bars)), [w for w, _ in bars], fontsize=7)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(
            f"contribution to {what}\nsum of the components − value computed by the model = {gap:.1e}".replace("-", "−")
        )
        _write_ends(figure, [v for _, v in bars])
    return figure


def _write_ends(figure: Figure, values: Sequence[float]) -> None:
    """Write the value of each bar next to its end, and widen the axis so that it fits."""
    ax = figure.axes[0]
    reach = max(map(abs, values)) or 1.0
    digits = max(0, min(8, 2 - math.floor(math.log10(reach))))
    texts = [minus(f"{v:+.{digits}f}") for v in values]
    low, high = min(0.0, *values), max(0.0, *values)
    settle(figure)
    inches = ax.get_window_extent().width / figure.canvas.dpi
    room = max(text_width(figure, t, 6.5) for t in texts) + 0.08
    units = (high - low or 1.0) / max(0.5, inches - 2 * room)
    ax.set_xlim(low - room * units * (low < 0) - 0.02 * (high - low), high + room * units * (high > 0 or low == 0))
    for row, (value, text) in enumerate(zip(values, texts, strict=True)):
        right = value >= 0
        x = value + (0.04 if right else -0.04) * units
        ax.text(x, row, text, ha="left" if right else "right", va="center", fontsize=6.5, color="black")


def patching_map(
    effects: Float[Array, "R T"],
    tokens: Sequence[object] | None = None,
    rows: Sequence[str] | None = None,
    *,
    axis: str = "layer",
    columns: str = "position (token of the clean text)",
    label: str = "effect of the patch (0: none, 1: fully restored)",
    title: str = "Effect of patching one clean activation into the corrupted run",
) -> Figure:
    """Draw the effect of each patch: layers or heads down, positions to the right; red is towards the clean answer.

    Colours are centred on zero and reach the largest effect. Values are written where they fit.
    """
    grid = finite("the effects", numbers(effects))
    n, T = grid.shape
    reach = float(np.abs(grid).max()) or 1.0
    cell = (WIDTH - 1.8) / T
    height = float(np.clip(1.6 + n * min(0.32, max(cell, 0.14)), 2.3, TALLEST))
    with titled(title, height=height) as figure:
        ax = figure.canvas.subplots()
        image = draw_map(ax, grid, -reach, reach, aspect="auto")
        ax.set_xlabel(columns)
        ax.set_ylabel(axis)
        bar = figure.canvas.colorbar(image, ax=ax, fraction=0.04, aspect=28, pad=0.02)
        bar.outline.set_visible(False)
        # a label longer than the bar would leave a flat figure
        bar.set_label(label if height > 3.4 else label.replace(" (", "\n("), fontsize=8)
        down = Labels(ax, "y", named(axis, rows, n))
        place_labels(figure, Labels(ax, "x", named("positions", tokens, T), tokens is not None), down)
        settle(figure)
        write_cells(figure, ax, image, [[brief(float(v)) for v in row] for row in grid])
    return figure
