"""Figures of attention: all heads on one sheet, one head, scores of heads, the stripe of an induction head.

Queries and layers run down, keys and heads to the right. The colour of an attention weight follows its square root, the
same scale in every figure, so that a weight of 0.01 is visible next to one of 1. `draw_map` draws every heat map of the
project in matplotlib, `draw_attention` every attention map.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from matplotlib.collections import PatchCollection
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.patches import Rectangle
from torch import Tensor

from glassformer.lens.figure import AMOUNT, COLOURS, GREY, SIGNED, WIDTH, Figure, FigureError
from glassformer.lens.figures.labels import (
    TALLEST,
    Labels,
    brief,
    finite,
    named,
    numbers,
    place_labels,
    readable,
    settle,
    titled,
    trim,
    wording,
    write_cells,
)
from glassformer.lens.heads import induction_score
from glassformer.shapes import Float, Shaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

Array = Tensor | np.ndarray
SHEET_PIXELS, MAP_PIXELS = 1000, 900
"""Pixels across a sheet and a single map: 6.3 inches at the 200 dots per inch of a saved figure."""


def max_pooled(maps: Float[np.ndarray, "*n T S"], most: int) -> Float[np.ndarray, "*n P Q"]:
    """Reduce maps to at most `most` rows and columns by taking the maximum over blocks, so that no weight is lost."""
    step = math.ceil(max(maps.shape[-2:]) / most)
    for axis in (-2, -1) if step > 1 else ():
        maps = np.maximum.reduceat(maps, np.arange(0, maps.shape[axis], step), axis=axis)
    return maps


def _weights(pattern: Array) -> Float[np.ndarray, "..."]:
    values = finite("the attention pattern", numbers(pattern))
    if values.min() < -1e-3 or values.max() > 1 + 1e-3:
        raise FigureError(
            f"attention weights lie in [0, 1], but these lie in [{values.min():.3g}, {values.max():.3g}]: pass the "
            "pattern after softmax."
        )
    return values


def draw_map(
    ax: "Axes",
    values: Shaped[Array, "R C"] | Sequence[Sequence[float]],
    low: float = 0.0,
    high: float = 1.0,
    *,
    norm: Normalize | None = None,
    colours: str | None = None,
    aspect: Literal["equal", "auto"] = "equal",
    extent: tuple[float, float, float, float] | None = None,
) -> "AxesImage":
    """Draw a matrix as a heat map: rows down, columns to the right. Cells of NaN are left out.

    Colours go from `low` to `high`, or follow `norm`. A scale that starts below 0 has diverging colours.
    """
    scale = Normalize(low, high) if norm is None else norm
    chosen = colours or (SIGNED if (scale.vmin or 0.0) < 0 else AMOUNT)
    return ax.imshow(np.asarray(values), cmap=chosen, norm=scale, aspect=aspect, extent=extent)


def draw_attention(ax: "Axes", pattern: Float[Array, "T S"]) -> "AxesImage":
    """Draw one attention pattern in coordinates of tokens, however many pixels it has. Cells of NaN are left out."""
    values = numbers(pattern)
    T, S = values.shape
    return draw_map(ax, max_pooled(values, MAP_PIXELS), norm=_weight_scale(), extent=(-0.5, S - 0.5, T - 0.5, -0.5))


def draw_mask(ax: "Axes", mask: Shaped[np.ndarray, "T S"], word: str) -> None:
    """Draw a boolean matrix, such as an attention mask: the word stands in every cell that is True."""
    draw_map(ax, mask, high=1.6, colours="Blues")  # light enough for black text
    for i, j in np.argwhere(mask):
        ax.text(j, i, word, ha="center", va="center", fontsize=7)


def _weight_scale() -> PowerNorm:
    return PowerNorm(0.5, vmin=0.0, vmax=1.0, clip=True)


def _colour_bar(figure: Figure, image: "AxesImage", ax: "Axes", label: str, short: bool = False) -> None:
    bar = figure.canvas.colorbar(image, ax=ax, label=label, fraction=0.05, aspect=24, pad=0.02, shrink=0.8)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2)
    if isinstance(image.norm, PowerNorm):
        bar.set_ticks([0, 0.1, 0.5, 1] if short else [0, 0.01, 0.05, 0.1, 0.2, 0.5, 1])


def attention_sheet(
    patterns: Float[Array, "L H T S"],
    tokens: Sequence[object] | None = None,
    *,
    title: str | None = None,
    layers: Sequence[int] | None = None,
) -> Figure:
    """Draw all heads of a model, one row of maps per layer. Large maps are reduced by taking maxima.

    A single layer is laid out as a block of maps, each with the number of its head. `layers` are the layer numbers.
    """
    values = _weights(patterns)
    L, H, T, S = values.shape
    layers = range(L) if layers is None else layers
    columns = H if L > 1 or H <= 4 else math.ceil(math.sqrt(H * 1.2))
    grid = values if columns == H else _wrapped(values[0], columns)
    mosaic, pitch, size = _mosaic(grid, 0.22 if columns != H else 0.07)
    height = min(TALLEST, 0.95 + min(WIDTH - 1.3, 2.1 * columns) * mosaic.shape[0] / mosaic.shape[1])
    what = f"Attention of all {L * H} heads" if L > 1 else f"Attention of the {H} heads of layer {layers[0]}"
    with titled(title or f"{what}, {T} queries (down) by {S} keys (right) each", height=max(2.0, height)) as figure:
        ax = figure.canvas.subplots()
        image = draw_map(ax, mosaic, norm=_weight_scale())
        for spine in ax.spines.values():
            spine.set_visible(False)
        step = math.ceil(max(T, S) / (SHEET_PIXELS // columns)) if T > 1 else 1
        pooled = f"each pixel is the maximum over {step} × {step} tokens" if step > 1 else ""
        note = "\n".join(filter(None, (_quoted(tokens), pooled)))
        if columns == H:
            ax.set_ylabel("layer")
            ax.set_xlabel(f"head\n{note}" if note else "head")
            centre = ((size[1] - 1) / 2, (size[0] - 1) / 2)
            across = Labels(ax, "x", [str(h) for h in range(H)], False, pitch[1], centre[0])
            down = Labels(ax, "y", [str(i) for i in layers], False, pitch[0], centre[1])
            place_labels(figure, across, down)
            ax.tick_params(length=0)
        else:
            ax.set(xticks=[], yticks=[], xlabel=note)
            for h in range(H):
                row, column = divmod(h, columns)
                at = (column * pitch[1] + size[1] / 2, row * pitch[0] + pitch[0] - size[0] - 1)
                ax.text(*at, f"head {h}", ha="center", va="bottom", fontsize=7)
        _colour_bar(figure, image, ax, "attention weight", short=height < 3)
        trim(figure)
    return figure


def _wrapped(maps: Float[np.ndarray, "H T S"], columns: int) -> Float[np.ndarray, "R C T S"]:
    """Arrange the heads of one layer as a block; the last row is filled with NaN."""
    H, T, S = maps.shape
    rows = math.ceil(H / columns)
    filled = np.concatenate([maps, np.full((rows * columns - H, T, S), np.nan, maps.dtype)])
    return filled.reshape(rows, columns, T, S)


def _mosaic(
    grid: Float[np.ndarray, "L H T S"], gap: float
) -> tuple[Float[np.ndarray, "P Q"], tuple[int, int], tuple[int, int]]:
    """Return one array of all maps with gaps of NaN, the distance between maps, and the size of a map, in pixels."""
    small = max_pooled(grid, SHEET_PIXELS // grid.shape[1])
    enlarge = max(1, 48 // max(small.shape[-2:]))  # otherwise a gap of one pixel would be as wide as a token
    small = small.repeat(enlarge, axis=-2).repeat(enlarge, axis=-1)
    L, H, P, Q = small.shape
    space = max(1, round(gap * max(P, Q)))
    framed = np.full((L, H, P + space, Q + space), np.nan, dtype=np.float32)
    framed[:, :, space:, :Q] = small
    sheet = framed.transpose(0, 2, 1, 3).reshape(L * (P + space), H * (Q + space))
    return sheet[space if gap < 0.2 else 0 :, :-space], (P + space, Q + space), (P, Q)


def _quoted(tokens: Sequence[object] | None) -> str:
    if not tokens:
        return ""
    ends = "".join(readable(t, 24) for t in tokens[:40])
    return f"“{ends[:60]}{'…' if len(ends) > 60 or len(tokens) > 40 else ''}”"


def _map_height(T: int, S: int) -> float:
    return float(np.clip(1.5 + 4.6 * T / S, 2.4, TALLEST))


def attention_head(
    pattern: Float[Array, "T S"],
    tokens: Sequence[object] | None = None,
    keys: Sequence[object] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Draw one head: row t has the weights of query t. `keys` are the key tokens if they differ from the queries."""
    values = _weights(pattern)
    T, S = values.shape
    if keys is None and tokens is not None and T == S:
        keys = tokens
    with titled(title or "Attention of one head: each row sums to 1", height=_map_height(T, S)) as figure:
        ax = figure.canvas.subplots()
        image = draw_attention(ax, values)
        ax.set(xlabel="key (attended to)", ylabel="query (attending)")
        _colour_bar(figure, image, ax, "attention weight", short=bool(figure.canvas.get_figheight() < 3))
        place_labels(
            figure,
            Labels(ax, "x", named("keys", keys, S), keys is not None),
            Labels(ax, "y", named("queries", tokens, T), tokens is not None),
        )
        trim(figure)
    return figure


def expected_stripe(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return (query, key) of perfect induction: a repeated token attends to what followed its earlier copies."""
    occurrences: dict[int, list[int]] = {}
    pairs = []
    for position, token in enumerate(ids):
        pairs += [(position, earlier + 1) for earlier in occurrences.get(token, [])]
        occurrences.setdefault(token, []).append(position)
    return pairs


def induction_stripe(
    pattern: Float[Array, "T S"],
    ids: Sequence[int],
    tokens: Sequence[object] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Draw one head and frame the cells to which an induction head attends: what followed the same token before.

    The title has the `induction_score` of this map.
    """
    values = _weights(pattern)
    T, S = values.shape
    if T != S or len(ids) != T:
        raise FigureError(f"a map of {T} queries by {S} keys for {len(ids)} tokens: induction needs one square map.")
    stripe = expected_stripe(ids)
    if not stripe:
        raise FigureError(f"none of the {T} tokens occurs twice: an induction head has nothing to repeat.")
    score = float(induction_score(torch.from_numpy(values.copy()), torch.tensor(list(ids))))
    words = [f"#{i}" for i in ids] if tokens is None else tokens
    heading = title or "Attention of one head; framed: where an induction head attends"
    with titled(f"{heading} (induction score {score:.2f})", height=_map_height(T, S)) as figure:
        ax = figure.canvas.subplots()
        image = draw_attention(ax, values)
        ax.set(xlabel="key (attended to)", ylabel="query (attending)")
        frames = [Rectangle((key - 0.5, query - 0.5), 1, 1) for query, key in stripe]
        width = float(np.clip(40 / T, 0.3, 1.4))
        ax.add_collection(
            PatchCollection(frames, facecolor="none", edgecolor=COLOURS[1], linewidth=width, clip_on=False)
        )
        _colour_bar(figure, image, ax, "attention weight")
        labels = named("tokens", words, T)
        place_labels(figure, Labels(ax, "x", labels, True), Labels(ax, "y", labels, True))
        trim(figure)
    return figure


def head_scores(
    scores: Mapping[str, Float[Array, "L H"] | None], *, title: str = "Scores of every head", signed: bool = False
) -> Figure:
    """Draw one heat map (layers down, heads to the right) per score. Values are written where they fit.

    None, or NaN in a cell, is an undefined score, which is grey. Scores within [0, 1] share that scale; all others have
    their own. `signed` centres the scale on zero.
    """
    if not scores:
        raise FigureError("no scores were given: pass at least one.")
    grids = {name: None if grid is None else numbers(grid) for name, grid in scores.items()}
    first = next((g for g in grids.values() if g is not None), np.zeros((1, 1)))
    columns = min(len(grids), 1 if first.shape[1] > 16 else 2 if len(grids) in (2, 4) or first.shape[1] > 8 else 3)
    rows = math.ceil(len(grids) / columns)
    cell = min(0.34, (WIDTH / columns - 0.9) / first.shape[1])
    panel = max(1.15, cell * first.shape[0] + 0.65)
    with titled(title, height=min(TALLEST, rows * panel + 0.35)) as figure:
        axes = figure.canvas.subplots(rows, columns, squeeze=False).ravel()
        for ax in axes[len(grids) :]:
            ax.set_axis_off()
        for ax, (name, grid) in zip(axes, grids.items(), strict=False):
            ax.set_title(wording(name, 40))
            if grid is None:
                ax.text(0.5, 0.5, "undefined\nin this model", ha="center", va="center", color=GREY, fontsize=8)
                ax.set_axis_off()
                continue
            _score_panel(figure, ax, grid, signed)
        drawn = [(ax, g) for ax, g in zip(axes, grids.values(), strict=False) if g is not None]
        across = [Labels(ax, "x", named("heads", None, grid.shape[1])) for ax, grid in drawn]
        down = [Labels(ax, "y", named("layers", None, grid.shape[0])) for ax, grid in drawn]
        place_labels(figure, *across, *down)
        settle(figure)
        for ax, grid in drawn:
            texts = [["" if math.isnan(v) else brief(float(v)) for v in row] for row in grid]
            write_cells(figure, ax, ax.images[0], texts)
    return figure


def _score_panel(figure: Figure, ax: "Axes", grid: Float[np.ndarray, "L H"], signed: bool) -> None:
    known = grid[np.isfinite(grid)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if signed or low < 0:
        reach = max(abs(low), abs(high)) or 1.0
        norm = Normalize(-reach, reach)
    else:
        norm = Normalize(0.0, 1.0 if high <= 1 else high)
    image = draw_map(ax, grid, norm=norm, aspect="auto")
    ax.set_facecolor("#dddddd")
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    _colour_bar(figure, image, ax, "score")
