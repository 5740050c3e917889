"""Write the generated pages of docs/ (`make docs`): claims, errata, presets and the fields of a run file.

A test compares the committed pages with the output of this module, so they cannot become outdated.
"""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment

from glassformer.files import write_atomically
from glassformer.pages.page import TEMPLATES
from glassformer.sizing import Catalogue
from glassformer.theory.claims.formulas import split
from glassformer.theory.claims.registry import CHAPTERS, TITLES, coverage, load_all
from glassformer.training.fields import run_file_page

FRAGILE = re.compile(r"\\[^a-zA-Z]|[*<>|~`]|(?<![A-Za-z0-9])_")
"""Characters of a formula that Markdown would interpret: escapes, emphasis, table bars."""
MADE = "<!-- Written by `make docs` from the claims: edit the words there, not here. -->"


def github(text: str) -> str:
    """Return text with formulas in GitHub's syntax: between dollar signs, protected from Markdown where needed."""
    pieces = []
    for kind, piece in split(text.strip()):
        formula = " ".join(piece.split())
        if kind == "text":
            pieces.append(_words(piece))
        elif kind == "display":
            pieces.append(f"\n\n```math\n{formula}\n```\n\n")
        else:
            pieces.append(f"$`{formula}`$" if FRAGILE.search(formula) else f"${formula}$")
    return "".join(pieces)


def _words(text: str) -> str:
    """Escape plain text for Markdown."""
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def _page(template: str) -> str:
    """Return the page of every claim by chapter with the coverage table, or that of every erratum after an index."""
    claims, environment = load_all(), Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {
        "github": github,
        "words": _words,
        "anchor": _anchor,
        "cell": lambda t: t.replace("|", "\\|"),
    }
    errata = sorted(((e, claim) for claim in claims.values() for e in claim.errata), key=lambda pair: pair[0].id)
    chapters = {TITLES[name]: [c for c in claims.values() if c.chapter == name] for name in CHAPTERS}
    text = environment.from_string((TEMPLATES / template).read_text(encoding="utf-8")).render(
        made=MADE,
        claims=claims,
        chapters={title: found for title, found in chapters.items() if found},
        coverage=coverage(),
        errata=errata,
        n_errata=len({e.id.rstrip("ab") for e, _ in errata}),
        errata_of=lambda row: [e.id for id in row.errata for e, _ in errata if e.id.rstrip("ab") == id],
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _anchor(title: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


PAGES: dict[str, Callable[[], str]] = {
    "claims.md": functools.partial(_page, "claims.md.jinja"),
    "errata.md": functools.partial(_page, "errata.md.jinja"),
    "presets.md": Catalogue().page,
    "run_file.md": run_file_page,
}


def main() -> int:
    """Write the pages to docs/, or to the given folder."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("docs")
    if not folder.is_dir():
        print(f"there is no folder {folder}: run this in the repository, or give a folder.", file=sys.stderr)
        return 2
    for name, page in PAGES.items():
        write_atomically(folder / name, page().encode())
        print(folder / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
