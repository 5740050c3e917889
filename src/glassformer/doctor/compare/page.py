"""A comparison as one HTML page: the verdict, the cases, and how far the models are apart at every place."""

import html
import math
from pathlib import Path

from glassformer.doctor.compare.result import WORDS, Comparison
from glassformer.files import write_atomically

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;width:100%;font-size:14px;margin:1rem 0}
th,td{text-align:left;padding:.2rem .6rem;border-bottom:1px solid #d8dee4}
td.n,th.n{font-variant-numeric:tabular-nums;text-align:right;white-space:nowrap}
td.b{min-width:4rem}@media(min-width:40rem){td.b{width:45%}}
h1,p,code{overflow-wrap:anywhere}
tr.first{background:#fff1d6;font-weight:600}
.bar{height:.7rem;background:#8aa4c8}.bad .bar{background:#c2523c}
code{font-size:90%}.verdict{font-size:1.2rem;font-weight:600}
@media(prefers-color-scheme:dark){
body{background:#14171a;color:#e3e6ea}tr.first{background:#4a3a1a}th,td{border-color:#333a41}}
"""
FLOOR, CEILING = -17.0, 2.0
"""Powers of ten between which bars grow."""


def page(result: Comparison) -> str:
    """The whole page; nothing is loaded from elsewhere."""
    parts = [f"<p class=verdict>{_e(result.sentence())}</p>"]
    if result.explanation is not None:
        found = result.explanation
        parts.append(f"<p><b>{_e(WORDS.get(found.convention, found.convention))}</b>: {_e(found.text)}</p>")
    parts.append(_cases(result))
    if result.steps:
        parts.append(_places(result))
    if result.parameters:
        rows = "".join(f"<tr><td><code>{_e(p.name)}</code><td>{_e(p.text)}" for p in result.parameters[:200])
        parts.append(f"<h2>Weights that differ</h2><table>{rows}</table>")
    parts += [f"<p>{_e(note)}</p>" for note in result.notes]
    title = f"{_e(result.names[0])} and {_e(result.names[1])}"
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'>"
    head += f"<title>{title}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>{title}</h1>{''.join(parts)}</body></html>\n"


def write(result: Comparison, file: Path) -> None:
    write_atomically(file, page(result).encode())


def _cases(result: Comparison) -> str:
    rows = []
    for m in result.measured:
        numbers = "".join(f"<td class=n>{'' if v is None else f'{v:.1e}'}" for v in (m.own, m.exact))
        said = {True: "agrees", False: "differs", None: "could not be asked"}[m.agrees]
        rows.append(f"<tr><td>{_e(m.name)}{numbers}<td>{said}<td>{_e(m.note)}")
    head = "<tr><th>case<th class=n>own precision<th class=n>float64<th><th>"
    return f"<h2>Logits</h2><table>{head}{''.join(rows)}</table>"


def _places(result: Comparison) -> str:
    rows = []
    for s in result.steps:
        power = math.log10(s.difference) if 0 < s.difference < math.inf else (FLOOR if s.difference == 0 else CEILING)
        width = 100 * (min(max(power, FLOOR), CEILING) - FLOOR) / (CEILING - FLOOR)
        classes = " ".join(
            c for c, on in (("bad", s.differs and not s.absolved), ("first", s.name == result.first)) if on
        )
        said = "without consequence" if s.absolved else ""
        bar = f"<div class=bar style='width:{width:.1f}%'></div>"
        place = f"<td><code>{_e(s.name)}</code><td class=n>{s.difference:.1e}"
        rows.append(f"<tr class='{classes}'>{place}<td class=b>{bar}<td>{said}")
    case = _e(result.case or "")
    text = f"<p>Largest difference over size, on a logarithmic scale from 1e{FLOOR:g} to 1e{CEILING:g} ({case}).</p>"
    return f"<h2>Places in the order of computation</h2>{text}<table>{''.join(rows)}</table>"


def _e(text: str) -> str:
    return html.escape(text)
