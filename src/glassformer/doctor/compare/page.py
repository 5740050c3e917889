"""Write a comparison as one HTML page: the verdict, the cases, and the difference of every activation."""

import math
from pathlib import Path
from typing import Any

from glassformer.anatomy.roles import Step
from glassformer.doctor.compare.result import Comparison, Measured
from glassformer.files import write_atomically
from glassformer.pages.page import render

FLOOR, CEILING = -17.0, 2.0
"""Powers of ten at which a bar is empty and full."""
MOST_PARAMETERS = 200
BEFORE, AFTER = 6, 5
"""Activations that a notebook shows before and after the first one that differs."""


def page(result: Comparison) -> str:
    """Return the comparison as a self-contained page."""
    return render(
        "compare.html",
        result=result,
        convention="" if result.explanation is None else result.explanation.words,
        cases=[_case(measured) for measured in result.measured],
        steps=[_step(step, step.name == result.first) for step in result.steps],
        parameters=(result.parameters or [])[:MOST_PARAMETERS],
        floor=f"{FLOOR:g}",
        ceiling=f"{CEILING:g}",
    )


def display(result: Comparison) -> str:
    """Return the comparison as an HTML fragment for a notebook, with the activations around the first difference."""
    names = [step.name for step in result.steps]
    at = names.index(result.first) if result.first in names else None
    around = [] if at is None else result.steps[max(at - BEFORE, 0) : at + AFTER + 1]
    return render(
        "display_comparison.html",
        result=result,
        cases=[_case(measured) for measured in result.measured],
        steps=[_step(step, step.name == result.first) for step in around],
        parameters=result.parameters or [],
        floor=f"{FLOOR:g}",
        ceiling=f"{CEILING:g}",
    )


def write(result: Comparison, file: Path) -> None:
    """Write the page to `file`, atomically."""
    write_atomically(file, page(result).encode())


def _case(measured: Measured) -> dict[str, str]:
    verdict = {True: "agrees", False: "differs", None: "could not be measured"}[measured.agrees]
    own, exact = ("" if value is None else f"{value:.1e}" for value in (measured.own, measured.exact))
    return {"name": measured.name, "own": own, "exact": exact, "verdict": verdict, "note": measured.note}


def _step(step: Step, is_first: bool) -> dict[str, Any]:
    bad = step.differs and not step.absolved
    classes = (("bad", bad), ("first", is_first))
    return {
        "bad": bad,
        "first": is_first,
        "name": step.name,
        "difference": f"{step.difference:.1e}",
        "percent": f"{_percent(step.difference):.1f}",
        "classes": " ".join(name for name, applies in classes if applies),
        "note": "no effect on the logits" if step.absolved else "",
    }


def _percent(difference: float) -> float:
    """Return the length of a bar: the exponent of the difference between FLOOR and CEILING."""
    if difference == 0:
        return 0.0
    power = math.log10(difference) if 0 < difference < math.inf else CEILING
    return 100 * (min(max(power, FLOOR), CEILING) - FLOOR) / (CEILING - FLOOR)
