"""Write the claims as one self-contained HTML page: formulas as MathML, figures as inline SVG."""

import datetime
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from glassformer.files import write_atomically
from glassformer.pages import mathml
from glassformer.pages.page import clean, render
from glassformer.theory.claims.explain import part_numbers, short
from glassformer.theory.claims.formulas import split, to_unicode
from glassformer.theory.claims.registry import CHAPTERS, TITLES, coverage
from glassformer.theory.claims.run import Outcome, Plan


def write(outcomes: Sequence[Outcome], plan: Plan, path: Path) -> Path:
    """Write the page to `path`, atomically."""
    write_atomically(path, page(outcomes, plan).encode())
    return path


def page(outcomes: Sequence[Outcome], plan: Plan) -> str:
    """Return the whole page."""
    held = sum(outcome.held for outcome in outcomes)
    passed = sum(outcome.finding.passed for outcome in outcomes)
    errata = {erratum.id for outcome in outcomes for erratum in outcome.claim.errata}
    total = len(outcomes)
    return render(
        "claims.html",
        chapters=_chapters(outcomes),
        coverage=_coverage(outcomes, errata),
        claim_ids={outcome.claim.id for outcome in outcomes},
        errata_ids=errata,
        errata_count=len({id.rstrip("ab") for id in errata}),
        held=held,
        total=total,
        badge=f"{held} of {total} controls fail, as they must" if plan.broken else f"{passed} of {total} claims pass",
        has_mathml=mathml.available(),
        formulas=formulas,
        figure=lambda outcome: namespaced(outcome.svg, outcome.claim.id),
        details=_details,
        numbers=part_numbers,
        date=f"{datetime.date.today():%d %B %Y}",
        seed=plan.seed,
    )


def _chapters(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    chapters = [
        {"id": chapter, "title": TITLES[chapter], "outcomes": [o for o in outcomes if o.claim.chapter == chapter]}
        for chapter in CHAPTERS
    ]
    return [chapter for chapter in chapters if chapter["outcomes"]]


def formulas(text: str) -> Markup:
    """Return text with LaTeX formulas as HTML. A formula that cannot be converted becomes plain text."""
    convert = mathml.mathml if mathml.available() else None
    pieces = [
        escape(piece) if kind == "text" else _formula(piece, kind == "display", convert)
        for kind, piece in split(text.strip())
    ]
    return Markup("").join(pieces)


def _formula(latex: str, block: bool, convert: Callable[..., Markup] | None) -> Markup:
    drawn = None
    if convert is not None:
        try:
            drawn = convert(latex, block=block)
        except Exception:  # the converter raises many types; a formula it cannot read is still readable as text
            drawn = None
    if drawn is None:
        drawn = Markup("<code>{}</code>").format(to_unicode(latex))
    return Markup('<span class="formula">{}</span>').format(drawn) if block else drawn


def _details(part: dict[str, Any]) -> str:
    """Return the measured values of one piece of evidence as text."""
    return "; ".join(f"{name} = {short(value)}" for name, value in part["evidence"].items() if name != "kind")


def _coverage(outcomes: Sequence[Outcome], errata: set[str]) -> list[dict[str, Any]]:
    verdicts = {outcome.claim.id: str(outcome.finding.verdict) for outcome in outcomes}
    rows = []
    for row in coverage():
        found = [verdicts[id] for id in row.items if id in verdicts]
        parts = [sorted(e for e in errata if e.rstrip("ab") == id) or [id] for id in row.errata]
        rows.append(
            {
                "cite": row.cite,
                "says": row.says,
                "verdict": row.note or str(row.verdict),
                "claims": row.items,
                "errata": [id for group in parts for id in group],
                "worst": next((word for word in ("fail", "skip", "pass") if word in found), ""),
            }
        )
    return rows


def namespaced(svg: str, name: str) -> Markup:
    """Prefix all ids of an SVG figure with a name, so that figures on one page do not share clip paths and glyphs."""
    name = re.sub(r"[^\w-]", "-", name)
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", clean(svg), flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    return Markup(re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg))
