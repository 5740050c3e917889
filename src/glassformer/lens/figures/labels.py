"""Words on a picture: tokens made drawable, axis labels thinned until none overlap, text in cells where it fits.

Everything is measured with the renderer: nothing here guesses how wide a word is.
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
"""Characters of a token that are shown."""
TICK_SIZE, CELL_SIZES = 7.0, (8.0, 7.0, 6.0, 5.5)
"""Points. Under 5.5 nothing is written."""
POINT = 1 / 72
TALLEST = 8.6
"""Inches: a page."""


def numbers(values: Shaped[Tensor | np.ndarray, "..."] | Sequence[object]) -> np.ndarray:
    """Any tensor or sequence as a floating array; what is already 4 bytes or wider is not copied."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values if values.dtype.itemsize >= 4 and values.dtype.is_floating_point else values.float()).numpy()
    made = np.asarray(values)
    return made if made.dtype.kind == "f" else made.astype(np.float64)


@functools.cache
def _drawable() -> frozenset[int]:
    """Code points the house font has."""
    path = font_manager.findfont(FontProperties(family=STYLE["font.family"]))
    return frozenset(font_manager.get_font(path).get_charmap())


def readable(token: object, longest: int = LONGEST) -> str:
    """A token as it can be drawn: blanks visible, what the font lacks or nobody sees as its code point, shortened."""
    text = "".join(BLANKS.get(character, character) for character in str(token))
    return wording(text, longest)


def wording(text: str, longest: int = 48) -> str:
    """A name as it can be drawn. `$` is escaped, or two of them would be read as a formula."""
    shown: list[str] = []
    length = 0
    for place, character in enumerate(text):
        unseen = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        piece = f"U+{ord(character):04X}" if unseen or ord(character) not in _drawable() else character
        rest = place + 1 < len(text)
        if length + len(piece) + rest > longest and shown:
            shown.append("…")
            break
        shown.append(piece)
        length += len(piece)
    return "".join(shown).replace("$", r"\$")


@contextmanager
def titled(title: str, width: float = WIDTH, height: float = 3.6) -> Iterator[Figure]:
    """`drawing`, with a title broken into lines that fit the width."""
    with drawing(title, width, height) as figure:
        size = float(STYLE["figure.titlesize"])
        fits = next(
            n for n in range(len(title) + 1, 0, -1)
            if all(text_width(figure, line, size) <= width - 0.2 for line in textwrap.wrap(title, n))
        )  # fmt: skip
        count = len(textwrap.wrap(title, fits))
        # lines of about one length: no orphan in the last
        even = next(n for n in range(1, fits + 1) if len(textwrap.wrap(title, n)) == count)
        lines = textwrap.wrap(title, even)
        figure.canvas.suptitle("\n".join(lines))
        figure.title = title.replace(r"\$", "$")
        figure.canvas.set_figheight(height + 0.16 * (len(lines) - 1))
        yield figure


def settle(figure: Figure) -> None:
    """Find every place that drawing would, without drawing."""
    engine = figure.canvas.get_layout_engine()
    assert engine is not None  # the house style has one
    engine.execute(figure.canvas)
    for ax in figure.axes:
        ax.apply_aspect()


def trim(figure: Figure, least: float = 1.9, most: float = TALLEST) -> None:
    """Give a picture of one map of fixed shape the height at which the map fills its place."""
    canvas, ax = figure.canvas, figure.axes[0]
    for _ in range(3):
        settle(figure)
        place, drawn = ax.get_position(original=True), ax.get_position()  # fractions of the picture
        width, height = canvas.get_figwidth(), canvas.get_figheight()
        shape = drawn.height * height / (drawn.width * width)
        wanted = float(np.clip(height + place.width * width * shape - place.height * height, least, most))
        if abs(wanted - height) < 0.02:
            return
        canvas.set_figheight(wanted)


class Labels(NamedTuple):
    """What is to stand along one axis of an image, one label per row or column."""

    ax: "Axes"
    side: Literal["x", "y"]
    words: Sequence[str]
    tokens: bool = False
    """Whether the words are tokens: thinned, they carry their index, since a word no longer says where it stands."""
    per_cell: float = 1.0
    """Data units between two labels."""
    start: float = 0.0


def stride(n: int, most: int) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... that leaves at most `most` of `n` labels."""
    power = 0
    while True:
        for step in (1, 2, 5):
            if math.ceil(n / (step * 10**power)) <= max(1, most):
                return step * 10**power
        power += 1


def place_labels(figure: Figure, *axes: Labels, size: float = TICK_SIZE) -> None:
    """Set tick labels so that none overlap: every one where there is room, every 2nd, 5th, 10th, ... where not.

    Two passes: the labels of the first decide how much room the layout leaves for those of the second.
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
    places = range(0, len(words), step)
    shown = [words[i] for i in places]
    if step > 1 and labels.tokens:
        shown = [f"{i}: {word}" for i, word in zip(places, shown, strict=True)]
    upright = side == "x" and max(map(functools.partial(text_width, figure, size=size), shown)) > 0.92 * pitch * step
    at = [labels.start + labels.per_cell * i for i in places]
    axis = ax.xaxis if side == "x" else ax.yaxis
    axis.set_ticks(at, shown, fontsize=size, rotation=90 if upright else 0)
    axis.set_tick_params(length=2, pad=2)


def text_width(figure: Figure, text: str, size: float) -> float:
    """Inches that a text takes."""
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
    """Write a text into each cell of an image, black or white by what stands out; False when the cells are too small.

    The layout is the one last settled. Numbers are written all or not at all. With `shorten`, words are cut to
    what fits a cell of at least two characters.
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
            dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.18  # equal contrast either way
            ax.text(
                j, i, cut(figure, text, size, width), ha="center", va="center", fontsize=size, clip_on=True,
                color="white" if dark else "black",
            )  # fmt: skip
    return True


def cut(figure: Figure, text: str, size: float, width: float) -> str:
    """The longest beginning of a text that fits, with an ellipsis when something is missing."""
    if text_width(figure, text, size) <= width:
        return text
    for end in range(len(text) - 1, 0, -1):
        if not text[:end].endswith("\\") and text_width(figure, text[:end] + "…", size) <= width:
            return text[:end] + "…"
    return ""


def finite(what: str, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Refuse values that cannot be drawn."""
    if values.size == 0:
        raise FigureError(f"{what} is empty: there is nothing to draw.")
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).sum())
        raise FigureError(f"{what} holds {bad} values that are not finite: find where they come from before drawing.")
    return values


def named(what: str, words: Sequence[object] | None, n: int) -> list[str]:
    """One drawable label per row or column; numbers where no words are given."""
    if words is None:
        return [str(i) for i in range(n)]
    if len(words) != n:
        raise FigureError(f"{len(words)} labels for {n} {what}: give one for each.")
    return [readable(word) for word in words]


def brief(value: float) -> str:
    """Two digits, to stand in a cell: .97, 1.0, 3.2, 47."""
    text = f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"
    if text in ("1.00", "-1.00"):
        text = text[:-1]
    text = text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text
    return ".00" if text == "-.00" else minus(text)


def minus(number: str) -> str:
    """A formatted number with the minus that axes use."""
    return number.replace("-", "−")
