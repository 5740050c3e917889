"""Theory: the claims, their words with formulas as MathML, their figures, and running one."""

import threading
from typing import Any

from glassformer.studio import schema
from glassformer.studio.errors import StudioError, UnknownError
from glassformer.studio.events import Emit
from glassformer.studio.jobs import Ticket
from glassformer.studio.mathml import pieces
from glassformer.theory.claims import TITLES, Claim
from glassformer.theory.claims.formulas import readable
from glassformer.theory.claims.registry import ClaimError, close_to, load_all

VERDICTS: dict[str, str] = {}
"""What a claim said when it last ran here, unbroken and with its default knobs."""
DRAWING = threading.Lock()
"""matplotlib's settings are one for the whole process: one figure at a time."""


def listing() -> list[dict[str, Any]]:
    """All claims in the order of the chapters; no torch."""
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
    """Every erratum that the claim has, or that its sources name, and whom it corrects: what a search looks for."""
    own = [word for erratum in claim.errata for word in (erratum.id, *erratum.sources)]
    return sorted({*own, *(id for source in claim.sources for id in source.errata)})


def known(id: str) -> Claim:
    claims = load_all()
    if id not in claims:
        raise UnknownError(f"there is no claim {id[:100]!r}.{close_to(id[:100], claims)}")
    return claims[id]


def words(id: str) -> dict[str, Any]:
    """One claim in full; texts come as pieces of plain text and MathML."""
    claim = known(id)
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
                "said": pieces(e.said),
                "fails": pieces(e.fails),
                "correct": pieces(e.correct),
                "example": e.example.strip(),
            }
            for e in claim.errata
        ],
    }


def knobs_of(claim: Claim, given: dict[str, float]) -> dict[str, float]:
    """All knobs of a claim, those given inside their limits."""
    own = {knob.name: knob for knob in claim.knobs}
    for name, value in given.items():
        if name not in own:
            raise ClaimError(f"{claim.id} has no knob {name[:60]!r}; its knobs: {', '.join(own) or 'none'}.")
        knob = own[name]
        if not knob.low <= value <= knob.high:
            raise StudioError(f"{name}={value:g} is outside its range: use {knob.low:g} to {knob.high:g}.")
    return {**{name: knob.default for name, knob in own.items()}, **given}


def run(id: str, asked: schema.RunClaim, ticket: Ticket, emit: Emit) -> None:
    """Events `part` as evidence comes, then `verdict`: the Finding that `gf.check` gives."""
    from glassformer.finding import Finding, Verdict
    from glassformer.theory.claims.claim import Lab, conclude, plain
    from glassformer.theory.claims.registry import find

    claim = known(id)
    lab = Lab(asked.seed, asked.broken, asked.slow, knobs_of(claim, asked.knobs))
    find(id)
    if claim.slow and not asked.slow:
        skipped = Finding.skip(id, "trains a model: runs with slow").to_dict()
        emit("verdict", {**skipped, "expected": "skip", "crashed": False})
        return
    parts, crashed = [], False
    try:
        for part in claim.check(lab):
            ticket.check()
            parts.append(part)
            emit("part", plain(part.to_dict()))
        for erratum in () if asked.broken else claim.errata:
            parts.append(erratum.examine())
            emit("part", plain(parts[-1].to_dict()))
        verdict = conclude(claim, parts)
    except Exception as error:  # a knob may be moved to where a check cannot go: its failure, not the server's
        crashed = True
        verdict = Finding(id, Verdict.FAIL, why=f"crashed: {type(error).__name__}: {' '.join(str(error).split())}")
    if not asked.broken and all(lab.knobs[knob.name] == knob.default for knob in claim.knobs):
        VERDICTS[id] = str(verdict.verdict)
    expected = str(Verdict.FAIL if asked.broken else Verdict.PASS)
    emit("verdict", {**plain(verdict.to_dict()), "expected": expected, "crashed": crashed})


def figure(id: str, given: dict[str, str]) -> str:
    """The figure of a claim as SVG; `seed`, `broken` and knobs may be given."""
    from glassformer.theory.claims.claim import Lab
    from glassformer.theory.claims.registry import find

    claim = known(id)
    if not claim.has_figure:
        raise UnknownError(f"{id} has no figure: its evidence is in its parts.")
    numbers = {name: _number(name, text) for name, text in given.items()}
    seed = int(min(max(numbers.pop("seed", 0.0), 0.0), 1e6))
    broken = bool(numbers.pop("broken", 0.0))
    lab = Lab(seed, broken, False, knobs_of(claim, numbers))
    find(id)
    draw = claim.figure
    assert draw is not None
    with DRAWING:
        return draw(lab).svg()


def _number(name: str, text: str) -> float:
    import math

    try:
        value = float({"true": "1", "false": "0"}.get(text.lower(), text))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise StudioError(f"{name[:60]}={text[:60]!r} must be a number.")
    return value
