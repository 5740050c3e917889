"""Write a doctor report as one HTML page: verdict, diagnoses, leak matrix, and every probe with its numbers."""

import math
from collections.abc import Iterable
from typing import Any

from markupsafe import Markup

from glassformer.doctor.report import Report
from glassformer.finding import Finding
from glassformer.pages.display import paint, picture
from glassformer.pages.page import render
from glassformer.pages.svg import attention_map


def to_html(report: Report) -> str:
    """Return the report as a self-contained page."""
    leak = report.pictures.get("leak")
    return render("doctor.html", report=report, leak_map=_leak_map(leak) if leak else "")


def display(report: Report) -> str:
    """Return the report as an HTML fragment for a notebook. The leak matrix is drawn if there is a leak."""
    leak = report.pictures.get("leak")
    leaks = any(diagnosis.id == "causal_leak" for diagnosis in report.diagnoses)
    drawn = _leak_map(leak, hover=False) if leak and leaks else ""
    text = "Which input (columns) changes which output (rows). Red: the output depends on a later token."
    return render(
        "display_report.html",
        report=report,
        evidence=[_rows(diagnosis.evidence) for diagnosis in report.diagnoses],
        probes=_rows(report.findings),
        leak_map=picture(paint(drawn), text, 340) if drawn else "",
    )


def _rows(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [
        {"verdict": f.verdict, "id": f.id, "numbers": f.numbers(), "why": f.evidence.get("cause") or f.why}
        for f in findings
    ]


def _leak_map(matrix: list[list[float]], hover: bool = True) -> Markup:
    """Draw how far output i (rows) changed when input j (columns) was replaced, relative to the largest change."""
    largest = max((v for row in matrix for v in row if math.isfinite(v)), default=0.0) or 1.0
    return attention_map(
        [[value / largest for value in row] for row in matrix],
        "Leak matrix",
        "Row: output position. Column: input position that was replaced. Red: the output depends on a later token.",
        labels=range(len(matrix)),
        row_axis="output",
        column_axis="input that changed",
        hover=(lambda i, j: f"output {i}, input {j}: {matrix[i][j]:.3g}") if hover else None,
        hover_from=0.0,
        faintest=0.2,
        mark_future=True,
    )
