"""Claims of the theory as checks that run, can fail, and report a verdict.

`ALL` maps ids to claims in the order of the chapters; `check(id)` runs one.
"""

from collections.abc import Mapping
from typing import Any

from glassformer.theory.claims.claim import Badge, Claim, Erratum, Kind, Lab, Source, Truth
from glassformer.theory.claims.registry import CHAPTERS, TITLES, ClaimError, check, coverage, find, load_all

__all__ = [
    "ALL",
    "CHAPTERS",
    "TITLES",
    "Badge",
    "Claim",
    "ClaimError",
    "Erratum",
    "Kind",
    "Lab",
    "Source",
    "Truth",
    "check",
    "coverage",
    "find",
]

ALL: Mapping[str, Claim]


def __getattr__(name: str) -> Any:
    if name == "ALL":  # read on first use, because importing must not read sixty files
        return load_all()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
