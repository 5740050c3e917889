"""Write a doctor report as one HTML page: verdict, diagnoses, leak matrix, and every probe with its numbers."""

import math

from markupsafe import Markup

from glassformer.doctor.report import Report
from glassformer.pages.page import render
from glassformer.pages.svg import attention_map


def to_html(report: Report) -> str:
    """Return the report as a self-contained page."""
    leak = report.pictures.get("leak")
    return render("doctor.html", report=report, leak_map=_leak_map(leak) if leak else "")


def _leak_map(matrix: list[list[float]]) -> Markup:
    """Draw how far output i (rows) changed when input j (columns) was replaced, relative to the largest change."""
    largest = max((v for row in matrix for v in row if math.isfinite(v)), default=0.0) or 1.0
    return attention_map(
        [[value / largest for value in row] for row in matrix],
        "Leak matrix",
        "Row: output position. Column: input position that was replaced. Red: the output depends on a later token.",
        labels=range(len(matrix)),
        row_axis="output",
        column_axis="input that changed",
        hover=lambda i, j: f"output {i}, input {j}: {matrix[i][j]:.3g}",
        hover_from=0.0,
        faintest=0.2,
        mark_future=True,
    )
