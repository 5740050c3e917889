"""Write the generated pages of docs/ (`make docs`): claims, errata, presets and the fields of a run file.

A test compares the committed pages with the output of this module, so they cannot become outdated.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

from glassformer.files import write_atomically
from glassformer.sizing import Catalogue
from glassformer.theory.claims.claim import Claim, Erratum, Source
from glassformer.theory.claims.formulas import split
from glassformer.theory.claims.registry import CHAPTERS, TITLES, coverage, load_all
from glassformer.training.fields import run_file_page

FRAGILE = re.compile(r"\\[^a-zA-Z]|[*<>|~`]|(?<![A-Za-z0-9])_")
"""Characters of a formula that Markdown would interpret: escapes, emphasis, table bars."""
MADE = "<!-- Written by `make docs` from the claims: edit the words there, not here. -->"


def github(text: str, cell: bool = False) -> str:
    """Return text with formulas in GitHub's syntax: between dollar signs, protected from Markdown where needed."""
    pieces = []
    for kind, piece in split(text.strip()):
        formula = " ".join(piece.split())
        if kind == "text":
            pieces.append(_words(piece))
        elif kind == "display" and not cell:
            pieces.append(f"\n\n```math\n{formula}\n```\n\n")
        else:
            pieces.append(f"$`{formula}`$" if FRAGILE.search(formula) else f"${formula}$")
    return "".join(pieces).replace("|", "\\|") if cell else "".join(pieces)


def _words(text: str) -> str:
    """Escape plain text for Markdown."""
    return re.sub(r"([*_<\[\]])", r"\\\1", text)


def claims_page() -> str:
    """Return the page of every claim by chapter, with the coverage table."""
    claims = load_all()
    by_chapter = {chapter: [c for c in claims.values() if c.chapter == chapter] for chapter in CHAPTERS}
    errata = len({e.id.rstrip("ab") for claim in claims.values() for e in claim.errata})
    lines = [
        "# Claims",
        MADE,
        f"{len(claims)} statements about Transformers, each with a check that runs, can fail, and has a negative "
        f"control that makes it fail. `glass check` runs the quick ones, `glass check ID --explain` shows derivation "
        f"and evidence, `glass check ID --break` the control. The {errata} errata of the sources are in [errata.md]"
        "(errata.md).",
        "A badge states the strength of the evidence. **proved**: exact or exhaustive evidence covers the statement as "
        "written. **verified on stated ranges**: parts are exact, the rest is measured on the stated ranges. "
        "**illustrated**: shown on examples or training runs.",
    ]
    lines += [
        "\n".join(
            f"- [{TITLES[chapter]}](#{_anchor(TITLES[chapter])}) ({len(found)})"
            for chapter, found in by_chapter.items()
            if found
        )
        + "\n- [Sources and results](#sources-and-results)"
    ]
    for chapter, found in by_chapter.items():
        if found:
            lines += [f"## {TITLES[chapter]}", *(_claim(claim) for claim in found)]
    lines += ["## Sources and results", _coverage_table()]
    return "\n\n".join(lines) + "\n"


def _claim(claim: Claim) -> str:
    sources = "\n".join(f"- {_source(source)}" for source in claim.sources)
    kinds = ", ".join(map(str, claim.kinds))
    errata = ", ".join(f"[{e.id}](errata.md#{e.id.lower()})" for e in claim.errata)
    flags = " --slow" if claim.slow else ""
    rows = [
        f"### {claim.id}",
        f"**{github(claim.title)}**",
        github(claim.statement),
        f"Sources:\n{sources}",
        f"Badge: **{claim.badge}** (evidence: {kinds}). Negative control: {github(claim.control)}"
        + (f" Errata: {errata}." if errata else ""),
        f"```sh\nglass check {claim.id}{flags} --explain\n```",
    ]
    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", row) for row in rows)


def _source(source: Source) -> str:
    return f"{source.cite}: {_words(source.says)}. {_words(source.note or str(source.verdict))}"


def _coverage_table() -> str:
    claims = load_all()
    errata = {e.id for claim in claims.values() for e in claim.errata}
    lines = ["| source | statement | result | claims | errata |", "|---|---|---|---|---|"]
    for row in coverage():
        items = ", ".join(f"[{id}](#{id})" for id in row.items)
        marks = [f"[{e}](errata.md#{e.lower()})" for id in row.errata for e in sorted(errata) if e.rstrip("ab") == id]
        cells = (row.cite, _words(row.says), _words(row.note or str(row.verdict)), items, ", ".join(marks))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def errata_page() -> str:
    """Return the page of every erratum in the order of its number, after an index."""
    pairs = sorted(((e, claim) for claim in load_all().values() for e in claim.errata), key=lambda pair: pair[0].id)
    index = ["| | source | flaw | claim |", "|---|---|---|---|"]
    index += [
        f"| [{e.id}](#{e.id.lower()}) | {', '.join(e.sources)} | {e.flaw} | [{claim.id}](claims.md#{claim.id}) |"
        for e, claim in pairs
    ]
    count = len({e.id.rstrip("ab") for e, _ in pairs})
    head = [
        "# Errata",
        MADE,
        f"{count} errors in published solutions: wrong, incomplete or imprecise statements. Each has a small example "
        "as self-contained Python that sets `holds`: whether the source's statement holds in this example. It is "
        "always `False`. `glass check ID` runs the examples of a claim with its check.",
        "\n".join(index),
    ]
    return "\n\n".join([*head, *(_erratum(e, claim) for e, claim in pairs)]) + "\n"


def _erratum(erratum: Erratum, claim: Claim) -> str:
    rows = [
        f"## {erratum.id}",
        f"{erratum.flaw.capitalize()}: {', '.join(erratum.sources)}. Claim: [{claim.id}](claims.md#{claim.id}).",
        f"**The source states.** {github(erratum.states)}",
        f"**Why it fails.** {github(erratum.fails)}",
        f"```python\n{erratum.example.strip()}\n```",
        f"**What holds.** {github(erratum.correct)}",
    ]
    return "\n\n".join(re.sub(r"\n{3,}", "\n\n", row) for row in rows)


def _anchor(title: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


PAGES: dict[str, Callable[[], str]] = {
    "claims.md": claims_page,
    "errata.md": errata_page,
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
