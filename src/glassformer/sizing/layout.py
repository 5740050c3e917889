"""Text for terminals of any width: paragraphs, numbers with a note beside or below them, aligned columns.

A width of None is that of a file: lines are as long as they are.
"""

import textwrap
from collections.abc import Sequence

MARGIN = " " * 6
"""Before what stands below because it did not fit beside."""


def fit(paragraph: str, width: int | None, indent: str = "") -> str:
    """As it stands; broken anew where one of its lines would go beyond `width`."""
    if width is None or max(map(len, paragraph.splitlines()), default=0) <= width:
        return paragraph
    words = " ".join(paragraph.split())
    return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def beside(numbers: str, note: str, width: int | None) -> str:
    """A note after its numbers; below them where both would go beyond `width`."""
    line = f"{numbers}   {note}".rstrip()
    if width is None or len(line.splitlines()[-1]) <= width:
        return line
    return f"{numbers}\n{fit(MARGIN + note, width, MARGIN)}"


def columns(rows: Sequence[Sequence[str]], width: int | None, names: int = 1) -> list[str]:
    """Each row of cells as a line: `names` columns to the left, numbers to the right, each as wide as its widest cell.

    Columns that would go beyond `width` stand below the first ones, in every row alike, which then has several lines.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    bands: list[list[int]] = [[]]
    end = 0
    for i, wide in enumerate(widths):
        if bands[-1] and width is not None and end + 2 + wide > width:
            bands.append([])
            end = len(MARGIN) - 2
        bands[-1].append(i)
        end += 2 + wide
    made = []
    for row in rows:
        cells = [cell.ljust(widths[i]) if i < names else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines = [(MARGIN if i else "  ") + "  ".join(cells[j] for j in band) for i, band in enumerate(bands)]
        made.append("\n".join(line.rstrip() for line in lines))
    return made
