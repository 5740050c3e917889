"""A picture: drawn by matplotlib, saved as png, svg, pdf or html, shown as SVG in notebooks. Never opens a window.

House style: 6.3 inches wide (a text column), 9-point type, Okabe-Ito colours (told apart by colour-blind readers),
`viridis` for amounts, `RdBu_r` centred on zero for signed values. Query rows run downwards, key columns to the right.
"""

import html
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from glassformer.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito (2008); yellow last, it is faint on white."""
AMOUNT, SIGNED = "viridis", "RdBu_r"
WIDTH = 6.3
"""Inches."""
FORMATS = ("png", "svg", "pdf", "html")
GREY = "#666666"

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.titlesize": 10,
    "axes.prop_cycle": cycler(color=list(COLOURS)),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "image.cmap": AMOUNT,
    "image.interpolation": "nearest",
    "svg.fonttype": "none",
    "svg.hashsalt": "glassformer",
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
}


class FigureError(ValueError):
    """A picture that cannot be drawn or written. One sentence."""


def format_of(path: str | Path) -> str:
    """The format that a file's suffix names; refuses those that cannot be written."""
    format = Path(path).suffix.removeprefix(".").lower()
    if format not in FORMATS:
        raise FigureError(
            f"{path} asks for the format {format or 'of no suffix'!r}, which cannot be written: "
            f"use one of {', '.join('.' + f for f in FORMATS)}."
        )
    return format


class Figure:
    """One drawn picture. `.save(path)` writes it; a notebook shows its SVG."""

    def __init__(self, canvas: Canvas, title: str):
        self.canvas, self.title = canvas, title

    @property
    def axes(self) -> "list[Axes]":
        return self.canvas.axes

    def save(self, path: str | Path) -> Path:
        """Write it in the format its suffix names, beside and renamed."""
        path = Path(path)
        format = format_of(path)
        data = self.html().encode() if format == "html" else self._rendered(format)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        except OSError as error:
            raise FigureError(f"{path} cannot be written ({error.strerror}): give another path.") from None
        return path

    def svg(self) -> str:
        """An SVG element, without the XML prologue, to be put into a page."""
        text = self._rendered("svg").decode()
        return text[text.index("<svg") :]

    def html(self) -> str:
        """One self-contained page."""
        return (
            '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{html.escape(self.title)}</title>"
            "<style>body{margin:2rem auto;max-width:60rem;font-family:sans-serif;background:#fff}"
            "svg{width:100%;height:auto}</style>"
            f"{self.svg()}</html>\n"
        )

    def _repr_svg_(self) -> str:
        return self.svg()

    def _rendered(self, format: str) -> bytes:
        # no date and a fixed salt: the same picture is the same bytes
        metadata = {
            "png": {"Title": self.title},
            "svg": {"Date": None, "Title": self.title},
            "pdf": {"CreationDate": None},
        }
        held = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.canvas.savefig(held, format=format, metadata=metadata[format])
        return held.getvalue()


@contextmanager
def drawing(title: str, width: float = WIDTH, height: float = 3.6, *, show_title: bool = True) -> Iterator[Figure]:
    """A figure in the house style to draw on: `with drawing("Attention of head 3") as fig: ax = fig.canvas.subplots()`.

    It never touches pyplot's state, so it works in threads, notebooks and servers alike.
    """
    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(width, height))
        FigureCanvasAgg(canvas)
        if show_title:
            canvas.suptitle(title)
        yield Figure(canvas, title)
