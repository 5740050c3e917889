"""Select claims by id, chapter, erratum, or the name of a source in any spelling."""

import re
from collections.abc import Sequence

from glassformer.errors import listing
from glassformer.theory.claims.claim import Source
from glassformer.theory.claims.registry import CHAPTERS, ClaimError, close_to, coverage, load_all

FILLER = ("ex", "exercise", "exercises", "question")
SAME = {"chapter": "ch", "chap": "ch"}


def select(names: Sequence[str] = (), source: str | None = None) -> list[str]:
    """Return the ids of the selected claims in the order of the registry; all if no name is given.

    A name is a claim, a chapter, or an erratum such as E31, which selects the claim that contains it.
    """
    claims = load_all()
    wanted: set[str] = set()
    for name in names:
        wanted |= _named(name)
    if source is not None:
        for row in find_sources(source):
            wanted |= set(row.items) or {id for erratum in row.errata for id in _named(erratum)}
    if not names and source is None:
        wanted = set(claims)
    missing = sorted(wanted - set(claims))
    if missing:
        raise ClaimError(f"the claim {missing[0]!r} is cited but has no file: this copy of glassformer is incomplete.")
    return [id for id in claims if id in wanted]


def _named(name: str) -> set[str]:
    claims = load_all()
    errata = {e.id.upper(): c.id for c in claims.values() for e in c.errata}
    if name in claims:
        return {name}
    if name in CHAPTERS:
        return {c.id for c in claims.values() if c.chapter == name}
    parts = {claim for id, claim in errata.items() if name.upper() in (id, id.rstrip("AB"))}  # E54: E54a and E54b
    if parts:
        return parts
    known = [*claims, *CHAPTERS, *errata]
    raise ClaimError(
        f"there is no claim, chapter or erratum {name!r}: `glass check --list` shows all.{close_to(name, known)}"
    )


def find_sources(text: str) -> tuple[Source, ...]:
    """Return the rows of the coverage table whose name starts with a text, ignoring case, spaces and points.

    `Bishop 12.3` finds `Bishop 12.3` and would find `Bishop 12.3 (a)`, never `Bishop 12.30`; `ch13 ex 6` finds both
    halves of `Ch. 13 ex. 6`.
    """
    asked = _words(text)
    found = tuple(row for row in coverage() if any(_begins(_words(name), asked) for name in _spellings(row.cite)))
    if not asked or not found:
        raise ClaimError(f"no source is called {text!r}: `glass check --list` shows all.{_nearest_source(text)}")
    return found


def _spellings(cite: str) -> list[str]:
    """`PS4 Q3a, Q3b` is found by either question, `ex. 1.5 + solution 1.5` by its exercise."""
    first, *others = cite.split(", ")
    return [cite, first, *(f"{first.rpartition(' ')[0]} {other}" for other in others if other.startswith("Q"))]


def _words(text: str) -> list[str]:
    words = re.findall(r"[a-z]+|\d+", text.lower())
    return [SAME.get(word, word) for word in words if word not in FILLER]


def _begins(name: list[str], asked: list[str]) -> bool:
    """Compare whole words and numbers; the last word may be a prefix: `q2a` matches `q2ai`, 1 does not match 12."""
    if not asked or len(asked) > len(name):
        return False
    *whole, last = asked
    fits = name[len(whole)].startswith(last) if last.isalpha() else name[len(whole)] == last
    return name[: len(whole)] == whole and fits


def _nearest_source(text: str) -> str:
    import difflib  # imported only for an error message

    names = {" ".join(_words(row.cite)): row.cite for row in coverage()}
    near = difflib.get_close_matches(" ".join(_words(text)), names, n=3, cutoff=0.5)
    return f" Did you mean {listing([repr(names[words]) for words in near])}?" if near else ""
