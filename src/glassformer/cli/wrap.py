"""Report text for the width of a terminal."""

import textwrap


def wrapped(text: str, width: int | None) -> str:
    """Break lines longer than `width` at blanks and indent what continues them; None: a line may have any length.

    Blanks at the end of a line are removed in either case.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        line = line.rstrip()
        if width is None or len(line) <= width:
            lines.append(line)
            continue
        indent = " " * min(len(line) - len(line.lstrip()) + 2, width // 2)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)
