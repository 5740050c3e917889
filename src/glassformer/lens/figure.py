"""Figures: drawn by matplotlib, saved as png, svg, pdf or html, shown as SVG in notebooks. They never open a window.

matplotlib is imported when a figure is drawn, so that modules which also compute start without it.

Style of all figures: 6.3 inches wide (a text column), 9-point type, Okabe-Ito colours (which colour-blind readers can
tell apart), `viridis` for amounts, `RdBu_r` centred on zero for signed values. Queries run down, keys to the right.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassformer.errors import GlassformerError
from glassformer.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""Okabe and Ito (2008). Yellow is last because it is faint on white."""
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
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
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


class FigureError(GlassformerError):
    """A figure cannot be drawn or written. The message is one sentence."""


def format_of(path: str | Path) -> str:
    """Return the format of a file by its suffix. Raises FigureError for a format that cannot be written."""
    format = Path(path).suffix.removeprefix(".").lower()
    if format not in FORMATS:
        suffixes = ", ".join("." + name for name in FORMATS)
        raise FigureError(f"{path} cannot be written as a figure because of its suffix: use one of {suffixes}.")
    return format


class Figure:
    """A drawn figure. `.save(path)` writes it; a notebook shows its SVG."""

    def __init__(self, canvas: "Canvas", title: str):
        self.canvas, self.title = canvas, title

    @property
    def axes(self) -> "list[Axes]":
        return self.canvas.axes

    def save(self, path: str | Path) -> Path:
        """Write the figure in the format of the suffix, atomically."""
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
        """Return the figure as an SVG element without the XML prologue, to be inserted into a page."""
        text = self._rendered("svg").decode()
        return text[text.index("<svg") :]

    def html(self) -> str:
        """Return the figure as a self-contained page."""
        from markupsafe import Markup

        from glassformer.pages.page import render

        return render("figure.html", title=self.title, svg=Markup(self.svg()))

    def _repr_svg_(self) -> str:
        return self.svg()

    def _rendered(self, format: str) -> bytes:
        # without a date and with a fixed salt, the same figure always gives the same bytes
        metadata = {
            "png": {"Title": self.title},
            "svg": {"Date": None, "Title": self.title},
            "pdf": {"CreationDate": None},
        }
        import matplotlib as mpl

        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.canvas.savefig(buffer, format=format, metadata=metadata[format])
        return buffer.getvalue()


@contextmanager
def drawing(title: str, width: float = WIDTH, height: float = 3.6, *, show_title: bool = True) -> Iterator[Figure]:
    """Give a figure to draw on: `with drawing("Attention of head 3") as fig: ax = fig.canvas.subplots()`.

    It does not use the state of pyplot, so it works in threads, notebooks and servers.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context(STYLE):
        canvas = Canvas(figsize=(width, height))
        FigureCanvasAgg(canvas)
        if show_title:
            canvas.suptitle(title)
        yield Figure(canvas, title)
