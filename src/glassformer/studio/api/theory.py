"""Theory view: the claims with formulas as MathML, their figures, and running one of them."""

import threading
from typing import Any

from glassformer.studio import schema
from glassformer.studio.errors import NotFoundError, StudioError
from glassformer.studio.events import Emit
from glassformer.studio.mathml import pieces
from glassformer.theory.claims import TITLES, Claim
from glassformer.theory.claims.formulas import readable
from glassformer.theory.claims.registry import ClaimError, close_to, load_all

VERDICTS: dict[str, str] = {}
"""Verdict of each claim that ran here with default knobs and without its negative control."""
DRAWING = threading.Lock()
"""matplotlib's settings are global to the process: draw one figure at a time."""


def list_claims() -> list[dict[str, Any]]:
    """Return all claims in the order of the chapters. Needs no torch."""
    return [
        {
            "id": claim.id,
            "chapter": claim.chapter,
            "chapter_title": TITLES[claim.chapter],
            "title": readable(claim.title),
            "badge": str(claim.badge),
            "kinds": [str(kind) for kind in claim.kinds],
            "slow": claim.slow,
            "sources": [source.cite for source in claim.sources],
            "errata_count": len(claim.errata),
            "errata": _errata(claim),
            "has_figure": claim.has_figure,
            "verdict": VERDICTS.get(claim.id),
        }
        for claim in load_all().values()
    ]


def _errata(claim: Claim) -> list[str]:
    """Return the ids of all errata of a claim and of its sources, and the sources they correct, for the search."""
    own = [name for erratum in claim.errata for name in (erratum.id, *erratum.sources)]
    return sorted({*own, *(id for source in claim.sources for id in source.errata)})


def find_claim(id: str) -> Claim:
    claims = load_all()
    if id not in claims:
        raise NotFoundError(f"there is no claim {id[:100]!r}.{close_to(id[:100], claims)}")
    return claims[id]


def describe(id: str) -> dict[str, Any]:
    """Return one claim in full; texts are split into plain text and MathML."""
    claim = find_claim(id)
    return {
        "id": claim.id,
        "chapter": claim.chapter,
        "title": pieces(claim.title),
        "statement": pieces(claim.statement),
        "derivation": [pieces(step) for step in claim.derivation],
        "control": pieces(claim.control),
        "badge": str(claim.badge),
        "kinds": [str(kind) for kind in claim.kinds],
        "slow": claim.slow,
        "has_figure": claim.has_figure,
        "verdict": VERDICTS.get(claim.id),
        "knobs": [vars(knob) for knob in claim.knobs],
        "sources": [
            {"cite": s.cite, "says": s.says, "verdict": str(s.verdict), "errata": list(s.errata), "note": s.note}
            for s in claim.sources
        ],
        "errata": [
            {
                "id": e.id,
                "flaw": e.flaw,
                "sources": list(e.sources),
                "states": pieces(e.states),
                "fails": pieces(e.fails),
                "correct": pieces(e.correct),
                "example": e.example.strip(),
            }
            for e in claim.errata
        ],
    }


def knob_values(claim: Claim, given: dict[str, float]) -> dict[str, float]:
    """Return the values of all knobs of a claim. Raises an error if a given value is out of range."""
    own = {knob.name: knob for knob in claim.knobs}
    for name, value in given.items():
        if name not in own:
            raise ClaimError(f"{claim.id} has no knob {name[:60]!r}; its knobs: {', '.join(own) or 'none'}.")
        knob = own[name]
        if not knob.low <= value <= knob.high:
            raise StudioError(f"{name}={value:g} is outside its range: use {knob.low:g} to {knob.high:g}.")
    return {**{name: knob.default for name, knob in own.items()}, **given}


def run(id: str, request: schema.RunClaim, emit: Emit) -> None:
    """Emit one `part` event per piece of evidence, then `verdict`: the Finding that `gf.check` returns."""
    from glassformer.finding import Finding, Verdict
    from glassformer.theory.claims.claim import Lab, conclude, plain
    from glassformer.theory.claims.registry import find

    claim = find_claim(id)
    lab = Lab(request.seed, request.broken, request.slow, knob_values(claim, request.knobs))
    find(id)
    if claim.slow and not request.slow:
        skipped = Finding.skip(id, "this claim trains a model: it runs with slow=True").to_dict()
        emit("verdict", {**skipped, "expected": "skip", "crashed": False})
        return
    parts, crashed = [], False
    try:
        for part in claim.check(lab):
            parts.append(part)
            emit("part", plain(part.to_dict()))
        for erratum in () if request.broken else claim.errata:
            parts.append(erratum.examine())
            emit("part", plain(parts[-1].to_dict()))
        verdict = conclude(claim, parts)
    except Exception as error:  # a check may fail for some values of its knobs: that is a verdict, not a server error
        crashed = True
        verdict = Finding(id, Verdict.FAIL, why=f"crashed: {type(error).__name__}: {' '.join(str(error).split())}")
    if not request.broken and all(lab.knobs[knob.name] == knob.default for knob in claim.knobs):
        VERDICTS[id] = str(verdict.verdict)
    expected = str(Verdict.FAIL if request.broken else Verdict.PASS)
    emit("verdict", {**plain(verdict.to_dict()), "expected": expected, "crashed": crashed})


def figure(id: str, query: schema.FigureQuery) -> str:
    """Return the figure of a claim as SVG."""
    from glassformer.theory.claims.claim import Lab
    from glassformer.theory.claims.registry import find

    claim = find_claim(id)
    if not claim.has_figure:
        raise NotFoundError(f"{id} has no figure: its evidence is in its parts.")
    lab = Lab(query.seed, query.broken, False, knob_values(claim, query.knobs))
    find(id)
    draw = claim.figure
    assert draw is not None
    with DRAWING:
        return draw(lab).svg()
