"""Text layout for terminals of any width: paragraphs, numbers with a note, aligned columns.

A width of None means no limit, for example for a file.
"""

import textwrap
from collections.abc import Sequence

MARGIN = " " * 6
"""Indent of text that did not fit on the line and goes on the next one."""


def wrap(paragraph: str, width: int | None, indent: str = "") -> str:
    """Return the paragraph unchanged if all its lines fit into `width`; otherwise rewrap it."""
    if width is None or max(map(len, paragraph.splitlines()), default=0) <= width:
        return paragraph
    words = " ".join(paragraph.split())
    return textwrap.fill(words, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def with_note(numbers: str, note: str, width: int | None) -> str:
    """Return the numbers followed by the note; the note goes on the next line if both do not fit into `width`."""
    line = f"{numbers}   {note}".rstrip()
    if width is None or len(line.splitlines()[-1]) <= width:
        return line
    return f"{numbers}\n{wrap(MARGIN + note, width, MARGIN)}"


def columns(rows: Sequence[Sequence[str]], width: int | None, names: int = 1) -> list[str]:
    """Format each row of cells as one line: the first `names` columns left-aligned, the others right-aligned.

    Columns that do not fit into `width` go on the next line, in every row alike, so a row may have several lines.
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
    texts = []
    for row in rows:
        cells = [cell.ljust(widths[i]) if i < names else cell.rjust(widths[i]) for i, cell in enumerate(row)]
        lines = [(MARGIN if i else "  ") + "  ".join(cells[j] for j in band) for i, band in enumerate(bands)]
        texts.append("\n".join(line.rstrip() for line in lines))
    return texts
