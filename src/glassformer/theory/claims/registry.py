"""The registry of claims: reads them from their files and runs one."""

import importlib
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from glassformer.errors import GlassformerError, listing, nearest
from glassformer.finding import Finding
from glassformer.theory.claims.claim import Badge, Claim, Erratum, Kind, Knob, Lab, Source, Truth, conclude

TITLES = {
    "weights": "Attention weights and scores",
    "heads": "Several heads",
    "matrix": "Attention as a matrix, permutations",
    "positions": "Positions",
    "probability": "Language-model probability",
    "counting": "Counting and budgets",
    "architecture": "Architecture",
    "theory": "Theory",
    "example": "A worked example",
}
"""The chapters in their order."""
CHAPTERS = tuple(TITLES)


class ClaimError(GlassformerError):
    """An unknown claim or source. The message is one sentence."""


@cache
def coverage() -> tuple[Source, ...]:
    """Return every exercise and sub-claim of the sources in their order, including those without a claim."""
    rows = tomllib.loads((files(__package__) / "coverage.toml").read_text(encoding="utf-8"))["row"]
    return tuple(
        Source(
            row["cite"],
            row["says"],
            Truth(row["verdict"]),
            tuple(row.get("items", ())),
            tuple(row.get("errata", ())),
            row.get("note", ""),
        )
        for row in rows
    )


@cache
def load_all() -> Mapping[str, Claim]:
    """Return every claim by id, in the order of the chapters."""
    claims: dict[str, Claim] = {}
    for chapter in CHAPTERS:
        folder = files(__package__) / chapter
        found = [item for item in folder.iterdir() if item.name.endswith(".toml")]
        read = [_read(chapter, tomllib.loads(item.read_text(encoding="utf-8"))) for item in found]
        mentioned = dict.fromkeys(id for source in coverage() for id in source.items)  # first mention first
        order = {id: n for n, id in enumerate(mentioned)}
        claims |= {c.id: c for c in sorted(read, key=lambda c: order.get(c.id, len(order)))}
    return claims


def _read(chapter: str, data: dict[str, Any]) -> Claim:
    errata = tuple(Erratum(**{**e, "sources": tuple(e["sources"])}) for e in data.pop("errata", ()))
    return Claim(
        chapter=chapter,
        kinds=tuple(Kind(k) for k in data.pop("kinds")),
        badge=Badge(data.pop("badge")),
        derivation=tuple(data.pop("derivation")),
        knobs=tuple(Knob(**k) for k in data.pop("knobs", ())),
        sources=tuple(s for s in coverage() if data["id"] in s.items),
        errata=errata,
        **data,
    )


def close_to(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean ...?`, or an empty string if no name is close."""
    known = list(known)
    within = [other for other in known if len(name) > 2 and name.lower() in other.lower()][:3]
    if within:
        return f" Did you mean {listing(within)}?"
    hint = nearest(name, known)
    return hint if "Did you mean" in hint else ""


def find(id: str) -> Claim:
    claims = load_all()
    if id not in claims:
        raise ClaimError(f"there is no claim {id!r}: `glass check --list` shows all.{close_to(id, claims)}")
    claim = claims[id]
    importlib.import_module(f"{__package__}.{claim.chapter}.{claim.module}")
    return claim


def check(id: str, *, seed: int = 0, slow: bool = True, broken: bool = False, **knobs: float) -> Finding:
    """Run one claim and its errata. `broken=True` runs its negative control, which must fail.

    >>> gf.check("permutation-equivariance").passed
    True
    """
    claim = find(id)
    unknown = set(knobs) - {k.name for k in claim.knobs}
    if unknown:
        name = sorted(unknown)[0]
        known = ", ".join(k.name for k in claim.knobs) or "none"
        raise ClaimError(f"{id} has no knob {name!r}; its knobs: {known}.")
    lab = Lab(seed, broken, slow, {**{k.name: k.default for k in claim.knobs}, **knobs})
    if claim.slow and not slow:
        return Finding.skip(id, "it trains a model: use --slow to run it")
    parts = list(claim.check(lab))
    if not broken:
        parts += [erratum.examine() for erratum in claim.errata]
    return conclude(claim, parts)
