"""The report as one HTML page: verdict, diagnoses, the leak matrix as a picture, every probe with its numbers."""

from html import escape

from glassformer.doctor.report import Diagnosis, Report
from glassformer.finding import Finding

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1f24; background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-size: .85rem }
td, th { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid #d8dee4;
  vertical-align: top }
.fail { color: #b42318; font-weight: 600 } .pass { color: #1a7f37 } .skip { color: #6e7781 }
.diagnosis { border-left: 4px solid #b42318; padding: .25rem 1rem; margin: 1rem 0; background: #fff5f4 }
.healthy { border-left: 4px solid #1a7f37; padding: .5rem 1rem; background: #f1fbf4 }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 } .diagnosis { background: #2a1516 }
  .healthy { background: #12261a } td, th { border-color: #30363d } }
"""


def to_html(report: Report) -> str:
    """A page that needs nothing beside itself."""
    head = f'<p class="{"healthy" if report.healthy else "diagnosis"}">{escape(report.verdict())}</p>'
    parts = [head, *(_diagnosis(d) for d in report.diagnoses)]
    if "leak" in report.pictures:
        parts.append(_leak(report.pictures["leak"]))
    parts.append("<h2>Probes</h2>" + _table(report.findings))
    if report.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
        parts.append(f"<h2>Notes</h2><ul>{items}</ul>")
    title = f"glass doctor: {escape(report.subject)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head>"
        f"<body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )


def _diagnosis(diagnosis: Diagnosis) -> str:
    place = f" ({escape(diagnosis.where())})" if diagnosis.where() else ""
    seen = "".join(
        f"<li><code>{escape(f.id)}</code> {escape(f.numbers())}: {escape(str(f.evidence.get('cause') or f.why))}</li>"
        for f in diagnosis.evidence
    )
    consequences = ", ".join(sorted({f.id for f in diagnosis.consequences}))
    after = f"<p>Probably its consequences: {escape(consequences)}.</p>" if consequences else ""
    return (
        f'<div class="diagnosis"><h2>{escape(diagnosis.id)}: {escape(diagnosis.title)}{place}</h2><ul>{seen}</ul>'
        f"<p><b>Remedy.</b> {escape(diagnosis.remedy)}</p>{after}</div>"
    )


def _leak(matrix: list[list[float]]) -> str:
    """Row i: output i; column j: the input that changed. Above the diagonal lies the future."""
    size, cell = len(matrix), 22
    top = max((v for row in matrix for v in row), default=0.0) or 1.0
    squares = []
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            strength = 0.0 if value == 0 else 0.15 + 0.85 * (value / top) ** 0.35
            colour = "#b42318" if j > i else "#31708f"
            label = f"output {i}, input {j}: {value:.3g}"
            squares.append(
                f'<rect x="{j * cell}" y="{i * cell}" width="{cell - 1}" height="{cell - 1}" fill="{colour}" '
                f'fill-opacity="{strength:.2f}" stroke="#8886"><title>{label}</title></rect>'
            )
    side = size * cell
    return (
        "<h2>Which input moved which output</h2>"
        "<p>Rows are outputs, columns the input that was replaced; red is the future.</p>"
        f'<svg width="{side}" height="{side}" role="img" aria-label="leak matrix">{"".join(squares)}</svg>'
    )


def _table(findings: tuple[Finding, ...]) -> str:
    rows = "".join(
        f'<tr><td class="{f.verdict}">{f.verdict}</td><td><code>{escape(f.id)}</code></td>'
        f"<td>{escape(f.numbers())}</td><td>{escape(f.why)}</td></tr>"
        for f in findings
    )
    return f"<table><tr><th></th><th>probe</th><th>measured and bound</th><th>why</th></tr>{rows}</table>"
