"""All claims on one self-contained page: formulas as MathML, figures as inline SVG. No network, no script."""

import datetime
import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glassformer.extras import install
from glassformer.files import write_atomically
from glassformer.pages.style import STYLE
from glassformer.theory.claims.claim import Claim, Erratum
from glassformer.theory.claims.explain import part_numbers, short
from glassformer.theory.claims.formulas import split, to_unicode
from glassformer.theory.claims.registry import CHAPTERS, TITLES, coverage
from glassformer.theory.claims.run import Outcome, Plan

OWN_STYLE = """
article { margin: 2.2rem 0; padding-top: .4rem; border-top: 1px dashed var(--edge); }
article h3 { font-size: 1.15rem; margin: .6rem 0 .2rem; } article > p { margin: .4rem 0; }
.plot { background: #fff; border: 1px solid var(--edge); border-radius: .4rem; padding: .4rem; }
.plot svg { margin: 0 auto; } .plot svg text { fill: #000; }
math { font-size: 1.08em; } .formula { display: block; margin: .6rem 0; }
.formula, article > p, li, blockquote p { overflow-x: auto; overflow-y: hidden; }
#coverage th { white-space: nowrap; font-weight: 400; }
summary { cursor: pointer; font-weight: 600; } details { margin: .5rem 0; } td p { margin: 0; }
.meta { color: var(--soft); font-size: .9rem; } ol li { margin: .4rem 0; }
blockquote { margin: .8rem 0; padding-left: .9rem; border-left: 4px solid var(--orange); }
"""
Render = Callable[[str], str]
escape = html.escape


def write(outcomes: Sequence[Outcome], plan: Plan, path: Path) -> Path:
    """The page at `path`, written beside it and renamed."""
    write_atomically(path, page(outcomes, plan).encode())
    return path


def page(outcomes: Sequence[Outcome], plan: Plan) -> str:
    """The whole page."""
    render, note = renderer()
    chapters = [(chapter, [o for o in outcomes if o.claim.chapter == chapter]) for chapter in CHAPTERS]
    chapters = [(chapter, found) for chapter, found in chapters if found]
    links = "".join(f'<li><a href="#{chapter}">{TITLES[chapter]}</a></li>' for chapter, _ in chapters)
    sections = "".join(
        f'<section id="{chapter}"><h2>{TITLES[chapter]}</h2>{"".join(_article(o, render) for o in found)}</section>\n'
        for chapter, found in chapters
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Claims about Transformers, checked</title>\n<style>{STYLE}{OWN_STYLE}</style></head>\n<body>"
        f"<header>{_header(outcomes, plan)}{note}</header>\n"
        f'<nav aria-label="Contents"><ol>{links}<li><a href="#coverage">Who says what</a></li></ol></nav>\n'
        f"<main>{sections}{_coverage(outcomes)}</main>\n"
        f"<footer><p>Written by glassformer, {datetime.date.today():%d %B %Y}, seed {plan.seed}. Every number in the "
        "evidence was measured in the run that wrote this page.</p></footer></body></html>\n"
    )


def renderer() -> tuple[Render, str]:
    """Text with formulas to HTML, and a note where formulas cannot be drawn properly."""
    try:
        from latex2mathml.converter import convert
    except ImportError:
        told = f"latex2mathml is not installed, so formulas are plain text here: {install('studio')}."
        return (lambda text: _html(text, None)), f'<p class="note">{told}</p>'
    return (lambda text: _html(text, convert)), ""


def _html(text: str, convert: Callable[..., str] | None) -> str:
    pieces = []
    for kind, piece in split(text.strip()):
        if kind == "text":
            pieces.append(escape(piece))
        else:
            pieces.append(_formula(piece, kind == "display", convert))
    return "".join(pieces)


def _formula(latex: str, display: bool, convert: Callable[..., str] | None) -> str:
    try:
        if convert is not None:
            drawn = convert(latex, display="block" if display else "inline")
            return f'<span class="formula">{drawn}</span>' if display else drawn
    except Exception:  # a formula that the converter cannot read is still worth reading
        pass
    words = escape(to_unicode(latex))
    return f'<span class="formula"><code>{words}</code></span>' if display else f"<code>{words}</code>"


def _header(outcomes: Sequence[Outcome], plan: Plan) -> str:
    held = sum(outcome.held for outcome in outcomes)
    kind = "pass" if held == len(outcomes) else "fail"
    passed = sum(outcome.finding.passed for outcome in outcomes)
    errata = len({e.id.rstrip("ab") for outcome in outcomes for e in outcome.claim.errata})
    what = "controls turned their check" if plan.broken else "claims pass"
    count = held if plan.broken else passed
    return (
        "<h1>What textbooks claim about Transformers</h1>"
        '<p class="lead">Each statement is a check that ran, could have failed, and has a negative control that makes '
        f"it fail. {errata} places where a source is wrong come with the smallest counterexample.</p>"
        f'<p><span class="badge {kind}">{count} of {len(outcomes)} {what}</span> '
        f"{held} of {len(outcomes)} verdicts are the recorded ones.</p>"
    )


def _article(outcome: Outcome, render: Render) -> str:
    claim = outcome.claim
    steps = "".join(f"<li>{render(step)}</li>" for step in claim.derivation)
    figure = ""
    if outcome.svg:
        figure = f'<figure class="plot">{namespaced(outcome.svg, claim.id)}</figure>'
    kinds = ", ".join(map(str, claim.kinds))
    return (
        f'<article id="{claim.id}"><h3>{render(claim.title)}</h3>'
        f'<p class="meta"><code>{claim.id}</code> · {_verdict(str(outcome.finding.verdict))} · '
        f"<strong>{outcome.badge}</strong> · {kinds} · {outcome.seconds:.1f} s</p>"
        f"<p>{render(claim.statement)}</p>{_said_in(claim)}{figure}"
        f"<details><summary>Derivation</summary><ol>{steps}</ol></details>"
        f"<details{'' if outcome.held else ' open'}><summary>Evidence</summary>{_evidence(outcome)}</details>"
        f"<p><strong>Negative control.</strong> {render(claim.control)} "
        f"<code>glass check {claim.id} --break</code></p>"
        + "".join(_erratum(erratum, render) for erratum in claim.errata)
        + "</article>\n"
    )


def _said_in(claim: Claim) -> str:
    said = "; ".join(f"{escape(s.cite)} ({escape(str(s.verdict))})" for s in claim.sources)
    return f'<p class="meta">Said in: {said}</p>'


def _verdict(verdict: str) -> str:
    return f'<span class="verdict {verdict}">{verdict}</span>'


def _evidence(outcome: Outcome) -> str:
    if not outcome.parts:
        return f"<p>{escape(outcome.finding.why)}</p>"
    rows = "".join(_part(part) for part in outcome.parts)
    return (
        '<div class="wide" tabindex="0" role="region" aria-label="Evidence"><table><thead><tr><th scope="col">evidence'
        '</th><th scope="col">kind</th><th scope="col">verdict</th><th scope="col">measured</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _part(part: dict[str, Any]) -> str:
    evidence = {name: value for name, value in part["evidence"].items() if name != "kind"}
    told = "; ".join(f"{name} = {short(value)}" for name, value in evidence.items())
    details = f'<span class="why">{escape(told)}</span>' if told else ""
    return (
        f'<tr><th scope="row">{escape(part["id"])}<span class="why">{escape(part["why"])}</span>{details}</th>'
        f"<td>{escape(part['evidence'].get('kind', ''))}</td><td>{_verdict(part['verdict'])}</td>"
        f"<td>{escape(part_numbers(part))}</td></tr>"
    )


def _erratum(erratum: Erratum, render: Render) -> str:
    return (
        f'<blockquote id="{erratum.id}"><p><strong>Erratum {erratum.id}</strong> ({erratum.flaw}; '
        f"{escape(', '.join(erratum.sources))})</p><p>Said: {render(erratum.said)}</p>"
        f"<p>Why it fails: {render(erratum.fails)}</p><p>What holds: {render(erratum.correct)}</p>"
        f"<details><summary>Smallest counterexample</summary><pre>{escape(erratum.example.strip())}</pre></details>"
        "</blockquote>"
    )


def _coverage(outcomes: Sequence[Outcome]) -> str:
    here = {outcome.claim.id: outcome for outcome in outcomes}
    errata = {e.id for o in outcomes for e in o.claim.errata}
    rows = []
    for row in coverage():
        items = ", ".join(f'<a href="#{id}">{id}</a>' if id in here else f"<span>{id}</span>" for id in row.items)
        known = [sorted(e for e in errata if e.rstrip("ab") == id) or [id] for id in row.errata]
        marks = ", ".join(f'<a href="#{e}">{e}</a>' if e in errata else e for group in known for e in group)
        verdicts = [str(here[id].finding.verdict) for id in row.items if id in here]
        worst = "fail" if "fail" in verdicts else "skip" if "skip" in verdicts else "pass" if verdicts else ""
        rows.append(
            f'<tr><th scope="row">{escape(row.cite)}</th><td>{escape(row.says)}</td><td>'
            f"{escape(row.note or str(row.verdict))}</td><td>{items}</td><td>{marks}</td>"
            f"<td>{_verdict(worst)}</td></tr>"
        )
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("source", "says", "so it is", "claims", "errata", "checks")
    )
    return (
        f'<section id="coverage"><h2>Who says what</h2><p>{len(rows)} exercises and statements of five sources, and '
        "what became of each.</p>"
        '<div class="wide" tabindex="0" role="region" aria-label="Coverage"><table><thead>'
        f"<tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def namespaced(svg: str, name: str) -> str:
    """An SVG whose ids carry a name before them: figures on one page must not share clip paths and glyphs."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    return re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
