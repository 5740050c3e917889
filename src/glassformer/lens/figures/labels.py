"""Text in figures: tokens made drawable, axis labels without overlap, text in cells where it fits.

Widths of text are measured with the renderer.
"""

import functools
import math
import textwrap
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from matplotlib import font_manager
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties
from torch import Tensor

from glassformer.lens.figure import STYLE, WIDTH, Figure, FigureError, drawing
from glassformer.shapes import Float, Shaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

BLANKS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "\u00a0": "⍽"}
LONGEST = 12
"""Most characters of a token that are shown."""
TICK_SIZE, CELL_SIZES = 7.0, (8.0, 7.0, 6.0, 5.5)
"""Points. Text smaller than 5.5 points is not written."""
POINT = 1 / 72
TALLEST = 8.6
"""Inches: the height of a page."""


def numbers(values: Shaped[Tensor | np.ndarray, "..."] | Sequence[object]) -> np.ndarray:
    """Return a tensor or sequence as a floating-point array. Values of at least 4 bytes are not copied."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values if values.dtype.itemsize >= 4 and values.dtype.is_floating_point else values.float()).numpy()
    made = np.asarray(values)
    return made if made.dtype.kind == "f" else made.astype(np.float64)


@functools.cache
def _drawable() -> frozenset[int]:
    """Return the code points of the font."""
    path = font_manager.findfont(FontProperties(family=STYLE["font.family"]))
    return frozenset(font_manager.get_font(path).get_charmap())


def readable(token: object, longest: int = LONGEST) -> str:
    """Return a token as a short label: white space is visible, and a character without a glyph is its code point."""
    text = "".join(BLANKS.get(character, character) for character in str(token))
    return wording(text, longest)


def wording(text: str, longest: int = 48) -> str:
    """Return text that can be drawn. `$` is escaped, because matplotlib reads two of them as a formula."""
    shown: list[str] = []
    length = 0
    for i, character in enumerate(text):
        invisible = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        piece = f"U+{ord(character):04X}" if invisible or ord(character) not in _drawable() else character
        rest = i + 1 < len(text)
        if length + len(piece) + rest > longest and shown:
            shown.append("…")
            break
        shown.append(piece)
        length += len(piece)
    return "".join(shown).replace("$", r"\$")


@contextmanager
def titled(title: str, width: float = WIDTH, height: float = 3.6) -> Iterator[Figure]:
    """Give a figure to draw on, like `drawing`, with the title wrapped to the width."""
    with drawing(title, width, height) as figure:
        size = float(STYLE["figure.titlesize"])
        fits = next(
            n for n in range(len(title) + 1, 0, -1)
            if all(text_width(figure, line, size) <= width - 0.2 for line in textwrap.wrap(title, n))
        )  # fmt: skip
        count = len(textwrap.wrap(title, fits))
        # lines of about the same length: no single word in the last one
        even = next(n for n in range(1, fits + 1) if len(textwrap.wrap(title, n)) == count)
        lines = textwrap.wrap(title, even)
        figure.canvas.suptitle("\n".join(lines))
        figure.title = title.replace(r"\$", "$")
        figure.canvas.set_figheight(height + 0.16 * (len(lines) - 1))
        yield figure


def settle(figure: Figure) -> None:
    """Compute the layout without drawing."""
    engine = figure.canvas.get_layout_engine()
    assert engine is not None  # the style of all figures has one
    engine.execute(figure.canvas)
    for ax in figure.axes:
        ax.apply_aspect()


def trim(figure: Figure, least: float = 1.9, most: float = TALLEST) -> None:
    """Set the height of a figure with one map of fixed shape so that the map fills its axes."""
    canvas, ax = figure.canvas, figure.axes[0]
    for _ in range(3):
        settle(figure)
        given, drawn = ax.get_position(original=True), ax.get_position()  # fractions of the figure
        width, height = canvas.get_figwidth(), canvas.get_figheight()
        shape = drawn.height * height / (drawn.width * width)
        wanted = float(np.clip(height + given.width * width * shape - given.height * height, least, most))
        if abs(wanted - height) < 0.02:
            return
        canvas.set_figheight(wanted)


class Labels(NamedTuple):
    """The labels along one axis of an image, one per row or column."""

    ax: "Axes"
    side: Literal["x", "y"]
    words: Sequence[str]
    tokens: bool = False
    """True if the words are tokens. If some are left out, the others show their index."""
    per_cell: float = 1.0
    """Data units between two labels."""
    start: float = 0.0


def stride(n: int, most: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that leaves at most `most` of `n` labels."""
    power = 0
    while True:
        for step in (1, 2, 5):
            if math.ceil(n / (step * 10**power)) <= max(1, most):
                return step * 10**power
        power += 1


def place_labels(figure: Figure, *axes: Labels, size: float = TICK_SIZE) -> None:
    """Set tick labels without overlap: all of them if they fit, otherwise every 2nd, 5th, 10th, ...

    There are two passes: the labels of the first determine how much space the layout leaves for those of the second.
    """
    for _ in range(2):
        settle(figure)
        for labels in axes:
            _place(figure, labels, size)


def _place(figure: Figure, labels: Labels, size: float) -> None:
    ax, side, words = labels.ax, labels.side, labels.words
    low, high = ax.get_xlim() if side == "x" else ax.get_ylim()
    box = ax.get_window_extent()
    pitch = (box.width if side == "x" else box.height) / figure.canvas.dpi * labels.per_cell / abs(high - low)  # inches
    line = 1.3 * size * POINT
    step = stride(len(words), int(len(words) * pitch / line))
    kept = range(0, len(words), step)
    shown = [words[i] for i in kept]
    if step > 1 and labels.tokens:
        shown = [f"{i}: {word}" for i, word in zip(kept, shown, strict=True)]
    upright = side == "x" and max(map(functools.partial(text_width, figure, size=size), shown)) > 0.92 * pitch * step
    at = [labels.start + labels.per_cell * i for i in kept]
    axis = ax.xaxis if side == "x" else ax.yaxis
    axis.set_ticks(at, shown, fontsize=size, rotation=90 if upright else 0)
    axis.set_tick_params(length=2, pad=2)


def text_width(figure: Figure, text: str, size: float) -> float:
    """Return the width of a text in inches."""
    return max(_width(line, size, float(figure.canvas.dpi)) for line in text.replace(r"\$", "$").split("\n"))


@functools.lru_cache(maxsize=4096)
def _width(line: str, size: float, dpi: float) -> float:
    font = FontProperties(family=STYLE["font.family"], size=size)
    return float(_renderer(dpi).get_text_width_height_descent(line, font, ismath=False)[0] / dpi)


@functools.lru_cache(maxsize=4)
def _renderer(dpi: float) -> RendererAgg:
    return RendererAgg(1, 1, dpi)


def write_cells(
    figure: Figure, ax: "Axes", image: "AxesImage", texts: Sequence[Sequence[str]], shorten: bool = False
) -> bool:
    """Write a text into each cell of an image, black or white by contrast. Return False if the cells are too small.

    Call `settle` first. Either all texts are written or none. With `shorten`, texts are cut to what fits, if a cell has
    room for two characters.
    """
    box = ax.get_window_extent()
    rows, columns = len(texts), len(texts[0])
    width, height = (0.94 * box.width / columns / figure.canvas.dpi, 0.94 * box.height / rows / figure.canvas.dpi)
    words = {text for row in texts for text in row}
    sizes = [s for s in CELL_SIZES if 1.25 * s * POINT <= height]
    whole = [s for s in sizes if all(text_width(figure, text, s) <= width for text in words)]
    partly = [s for s in sizes if shorten and text_width(figure, "mm", s) <= width]
    if not whole and not partly:
        return False
    size = whole[0] if whole else partly[-1]
    colours = image.to_rgba(np.ma.asarray(image.get_array()))
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            red, green, blue = colours[i, j, :3]
            dark = (
                0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.18
                # the luminance at which black and white have equal contrast
            )
            ax.text(
                j, i, cut(figure, text, size, width), ha="center", va="center", fontsize=size, clip_on=True,
                color="white" if dark else "black",
            )  # fmt: skip
    return True


def cut(figure: Figure, text: str, size: float, width: float) -> str:
    """Return the longest beginning of a text that fits, with an ellipsis if something is left out."""
    if text_width(figure, text, size) <= width:
        return text
    for end in range(len(text) - 1, 0, -1):
        if not text[:end].endswith("\\") and text_width(figure, text[:end] + "…", size) <= width:
            return text[:end] + "…"
    return ""


def finite(what: str, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Return the values. Raises FigureError if there are none or if some are NaN or infinite."""
    if values.size == 0:
        raise FigureError(f"{what} is empty: pass at least one value.")
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).sum())
        raise FigureError(f"{what} has {bad} values that are NaN or infinite: fix their cause before drawing.")
    return values


def named(what: str, words: Sequence[object] | None, n: int) -> list[str]:
    """Return one drawable label per row or column. Default: their numbers."""
    if words is None:
        return [str(i) for i in range(n)]
    if len(words) != n:
        raise FigureError(f"{len(words)} labels for {n} {what}: pass one for each.")
    return [readable(word) for word in words]


def brief(value: float) -> str:
    """Return a number with two digits, short enough for a cell: .97, 1.0, 3.2, 47."""
    text = f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"
    if text in ("1.00", "-1.00"):
        text = text[:-1]
    text = text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text
    return ".00" if text == "-.00" else minus(text)


def minus(number: str) -> str:
    """Return a formatted number with the minus sign of matplotlib."""
    return number.replace("-", "−")
