"""Claims that exist only in a test: registered under a name, taken away afterwards."""

from contextlib import contextmanager

from glassformer.theory.claims import registry
from glassformer.theory.claims.claim import CHECKS, FIGURES, Badge, Claim, Kind


def words(id="invented", **changes):
    facts = {
        "id": id,
        "chapter": "weights",
        "title": "An invented claim",
        "statement": r"$1 \le 2$ for every number.",
        "kinds": (Kind.EXACT, Kind.NUMERICAL),
        "badge": Badge.PROVED,
        "derivation": ("One is less than two.", "Hence the claim."),
        "control": "One is replaced by three.",
        "module": "simplex",
        "sources": (registry.coverage()[0],),
        "evidence": {"<part>": "the reason for <part>"},
        "has_figure": False,
    }
    return Claim(**{**facts, **changes})


@contextmanager
def invented(monkeypatch, check, figure=None, **changes):
    """A claim with this check, next to the real ones."""
    claim = words(**changes)
    everything = {**registry.load_all(), claim.id: claim}
    with monkeypatch.context() as patch:
        for module in ("registry", "run", "show", "selection"):
            patch.setattr(f"glassformer.theory.claims.{module}.load_all", lambda: everything)
        patch.setitem(CHECKS, claim.id, check)
        if figure is not None:
            patch.setitem(FIGURES, claim.id, figure)
        yield claim
