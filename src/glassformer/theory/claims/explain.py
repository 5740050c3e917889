"""Print one claim in full: statement, sources, derivation, evidence, control, errata."""

import textwrap
from typing import Any

from glassformer.errors import plural
from glassformer.finding import Verdict
from glassformer.theory.claims.claim import ERRATUM, Claim, Erratum
from glassformer.theory.claims.formulas import readable
from glassformer.theory.claims.registry import TITLES
from glassformer.theory.claims.run import Outcome

WIDTH = 96
MANY = 12
"""Maximum number of list entries shown for a piece of evidence."""


def explain(outcome: Outcome, width: int = WIDTH) -> str:
    """Return the full text of a claim with the measurements of this run."""
    claim = outcome.claim
    kinds = ", ".join(map(str, claim.kinds))
    head = [
        textwrap.fill(f"{claim.id}: {readable(claim.title)}", width),
        textwrap.fill(f"{outcome.finding.verdict} · {outcome.badge} · {kinds} · {TITLES[claim.chapter]}", width),
    ]
    sections = [
        "\n".join(head),
        _section("Statement", paragraphs(claim.statement, width)),
        _section("Sources", _sources(claim, width)),
        _section("Derivation", _steps(claim, width)),
        _section(f"Evidence (seed {outcome.plan.seed}, {outcome.seconds:.1f} s)", _evidence(outcome, width)),
        _section("Negative control", paragraphs(claim.control, width)),
    ]
    if claim.errata:
        sections.append(_section("Errata", "\n\n".join(_erratum(e, width) for e in claim.errata)))
    return "\n\n".join(sections)


def _section(title: str, body: str) -> str:
    return f"{title}\n{'-' * len(title)}\n{body}"


def paragraphs(text: str, width: int, first: str = "", rest: str | None = None) -> str:
    """Return wrapped text with Unicode formulas; displayed formulas keep their own lines."""
    blocks = [block for block in readable(text).split("\n\n") if block.strip()]
    rest = first if rest is None else rest
    lines = []
    for number, block in enumerate(blocks):
        lead = first if number == 0 else rest
        indent = "    " if block.startswith("    ") else ""
        words = " ".join(block.split(" ")).replace("\n", " ").strip()
        lines.append(textwrap.fill(words, width, initial_indent=lead + indent, subsequent_indent=rest + indent))
    return "\n".join(lines)


def _sources(claim: Claim, width: int) -> str:
    rows = []
    for source in claim.sources:
        errata = f" ({', '.join(source.errata)})" if source.errata else ""
        words = f"{source.cite}: {source.says}. {source.note or source.verdict}{errata}"
        rows.append(textwrap.fill(words, width, subsequent_indent="    "))
    return "\n".join(rows)


def _steps(claim: Claim, width: int) -> str:
    return "\n".join(
        paragraphs(step, width, f"{number:>2}. ", "    ") for number, step in enumerate(claim.derivation, 1)
    )


def _evidence(outcome: Outcome, width: int) -> str:
    if not outcome.parts:
        return textwrap.fill(outcome.finding.why, width)
    return "\n".join(_part(part, width) for part in outcome.parts)


def _part(part: dict[str, Any], width: int) -> str:
    evidence = dict(part["evidence"])
    kind = evidence.pop("kind", "")
    line = f"{part['verdict']:<4}  {kind:<11}  {part['id']}"
    if numbers := part_numbers(part):
        line += f"   {numbers}"
    lines = [textwrap.fill(line, width, subsequent_indent=" " * 6)]
    lines.append(textwrap.fill(part["why"], width, initial_indent=" " * 6, subsequent_indent=" " * 6))
    if kind == ERRATUM:
        evidence = evidence.get("values", {})
    if evidence:
        values = "; ".join(f"{name} = {short(value)}" for name, value in evidence.items())
        lines.append(textwrap.fill(values, width, initial_indent=" " * 6, subsequent_indent=" " * 8))
    if part["remedy"] and part["verdict"] != Verdict.PASS:
        remedy = f"remedy: {part['remedy']}"
        lines.append(textwrap.fill(remedy, width, initial_indent=" " * 6, subsequent_indent=" " * 8))
    return "\n".join(lines)


def part_numbers(part: dict[str, Any]) -> str:
    """Return the measurement with its bound, or the number of wrong cases; a proof has neither."""
    measured, bound, low = part["measured"], part["bound"], part.get("low")
    kind, cases = part["evidence"].get("kind"), part["evidence"].get("cases")
    if measured is None or (kind in ("exact", ERRATUM) and part["verdict"] == Verdict.PASS):
        return ""
    if kind == "exhaustive" and cases:
        return f"{measured:,.0f} of {plural(cases, 'case')} wrong"
    below = f"{short(low)} <= " if low is not None else ""
    above = f" <= {short(bound)}" if bound is not None else ""
    if part["verdict"] == Verdict.FAIL:
        return f"{short(measured)}, not {below}it{above}"
    return f"{below}{short(measured)}{above}"


def short(value: Any) -> str:
    """Return a value in few characters."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        more = f", ... ({len(value)})" if len(value) > MANY else ""
        return f"[{', '.join(short(item) for item in value[:MANY])}{more}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {short(item)}" for key, item in value.items()) + "}"
    return str(value)


def _erratum(erratum: Erratum, width: int) -> str:
    pad = " " * 4
    return "\n".join(
        [
            textwrap.fill(f"{erratum.id} ({erratum.flaw}; {', '.join(erratum.sources)})", width),
            paragraphs(f"the source states: {erratum.states}", width, pad),
            paragraphs(f"fails: {erratum.fails}", width, pad),
            paragraphs(f"holds instead: {erratum.correct}", width, pad),
            f"{pad}as code; `holds` is False at the end:",
            textwrap.indent(erratum.example.strip(), pad * 2),
        ]
    )
