"""The report as one HTML page: verdict, diagnoses, the leak matrix as a picture, every probe with its numbers."""

from html import escape

from glassformer.doctor.report import Diagnosis, Report
from glassformer.finding import Finding

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1f24; background: #fff }
h1, p, li, code { overflow-wrap: anywhere }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100%; font-size: .85rem }
td, th { text-align: left; padding: .25rem .5rem; border-bottom: 1px solid #d8dee4;
  vertical-align: top }
.fail { color: #b42318; font-weight: 600 } .pass { color: #1a7f37 } .skip { color: #6e7781 }
svg text { font: 11px system-ui, sans-serif; fill: currentColor }
.diagnosis { border-left: 4px solid #b42318; padding: .25rem 1rem; margin: 1rem 0; background: #fff5f4 }
.healthy { border-left: 4px solid #1a7f37; padding: .5rem 1rem; background: #f1fbf4 }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 } .diagnosis { background: #2a1516 }
  .healthy { background: #12261a } td, th { border-color: #30363d }
  .fail { color: #ff8a80 } .pass { color: #56d364 } .skip { color: #a3adb8 } }
@media (max-width: 40rem) { .probes tr { display: grid; grid-template-columns: 2.5rem 1fr auto }
  .probes td, .probes th { padding: .25rem .4rem .25rem 0 } .probes td:nth-child(-n+3) { border: 0 }
  .probes :last-child { grid-column: 2 / -1 } .probes th:last-child { display: none } }
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
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
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
    size, cell, left, above = len(matrix), 22, 44, 40
    most = max((v for row in matrix for v in row), default=0.0) or 1.0
    parts = [
        f'<text x="{left}" y="14">input that changed</text>',
        f'<text x="14" y="{above + size * cell}" transform="rotate(-90 14 {above + size * cell})">output</text>',
    ]
    for i, row in enumerate(matrix):
        middle = i * cell + cell / 2
        parts.append(f'<text x="{left + middle}" y="{above - 6}" text-anchor="middle">{i}</text>')
        parts.append(f'<text x="{left - 6}" y="{above + middle + 4}" text-anchor="end">{i}</text>')
        for j, value in enumerate(row):
            strength = 0.0 if value == 0 else 0.15 + 0.85 * (value / most) ** 0.35
            colour = "#b42318" if j > i else "#31708f"
            parts.append(
                f'<rect x="{left + j * cell}" y="{above + i * cell}" width="{cell - 1}" height="{cell - 1}" '
                f'fill="{colour}" fill-opacity="{strength:.2f}" stroke="#8886">'
                f"<title>output {i}, input {j}: {value:.3g}</title></rect>"
            )
    width, height = left + size * cell, above + size * cell
    return (
        "<h2>Which input moved which output</h2>"
        "<p>Rows are outputs, columns the input that was replaced; red is the future, and stronger is further.</p>"
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="leak matrix">{"".join(parts)}</svg>'
    )


def _table(findings: tuple[Finding, ...]) -> str:
    rows = "".join(
        f'<tr><td class="{f.verdict}">{f.verdict}</td><td><code>{escape(f.id)}</code></td>'
        f"<td>{escape(f.numbers())}</td><td>{escape(f.why)}</td></tr>"
        for f in findings
    )
    return (
        f'<table class="probes"><tr><th></th><th>probe</th><th>measured and bound</th><th>why</th></tr>{rows}</table>'
    )
