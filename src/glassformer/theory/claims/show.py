"""Print claims on a terminal: one table per chapter that is filled while they run, and the list of all claims."""

import io
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from glassformer.errors import plural
from glassformer.finding import Verdict
from glassformer.theory.claims.claim import Badge, Claim, Source, Truth
from glassformer.theory.claims.registry import CHAPTERS, TITLES, coverage, load_all
from glassformer.theory.claims.run import Outcome, Plan

STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIP: "yellow"}
PLAIN_WIDTH = 120
"""Number of columns if the width is unknown: a pipe or a file."""
VERDICT, BADGE, SECONDS, GAPS = 5, 11, 6, 4
NUMBERS = len("-8.88e-16 <= 9.93e-14")
"""Minimum number of columns for a measurement and its bound; a narrower terminal folds the names of the claims."""


class Trimmed(io.TextIOBase):
    """Standard output without the trailing spaces that rich writes. Rich writes whole lines."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        sys.stdout.flush()


def console() -> Console:
    """Return a console on standard output. A pipe or a file gets wide lines without trailing spaces."""
    out = Console(highlight=False)
    if out.is_terminal:
        return out
    return Console(highlight=False, width=max(out.width, PLAIN_WIDTH), file=cast(IO[str], Trimmed()))


class Board:
    """The tables of a run. Outcomes come in order; a complete chapter is printed and no longer updated."""

    def __init__(self, ids: Sequence[str], plan: Plan, out: Console):
        claims = load_all()
        self.plan, self.out = plan, out
        self.waiting = {chapter: [claims[id] for id in ids if claims[id].chapter == chapter] for chapter in CHAPTERS}
        self.done: dict[str, Outcome] = {}
        self.width = max((len(id) for id in ids), default=10)
        self.live_table: Live | None = None

    @contextmanager
    def shown(self) -> Iterator["Board"]:
        """Update the table live on a terminal; elsewhere print each chapter when it is complete."""
        if not self.out.is_terminal:
            yield self
            return
        with Live(console=self.out, transient=True, auto_refresh=False) as self.live_table:
            self.refresh()
            yield self

    def add(self, outcome: Outcome) -> None:
        self.done[outcome.claim.id] = outcome
        chapter = outcome.claim.chapter
        if all(claim.id in self.done for claim in self.waiting[chapter]):
            claims = self.waiting.pop(chapter)
            self.refresh()  # the live display must not contain the table that is printed now
            self.out.print(self.table(chapter, claims))
            self.reasons([self.done[claim.id] for claim in claims])
        self.refresh()

    def refresh(self) -> None:
        if self.live_table is not None:
            current = next(((chapter, claims) for chapter, claims in self.waiting.items() if claims), None)
            self.live_table.update(self.table(*current) if current else Text(""), refresh=True)

    def table(self, chapter: str, claims: Sequence[Claim]) -> Table:
        last = "what failed" if self.plan.broken else "measured and bound"
        room = self.out.width - VERDICT - BADGE - SECONDS - GAPS
        name = min(self.width, max(10, room - NUMBERS))
        table = Table(
            Column("", width=VERDICT),
            Column("claim", overflow="fold", width=name),
            Column("badge", no_wrap=True, width=BADGE),
            Column(last, overflow="fold", ratio=1),
            Column("s", justify="right", no_wrap=True, width=SECONDS),
            title=TITLES[chapter],
            title_justify="left",
            title_style="bold",
            box=None,
            expand=True,
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for claim in claims:
            outcome = self.done.get(claim.id)
            if outcome is None:
                table.add_row("...", claim.id, _short(claim.badge), "", "")
            else:
                cell = Text(_verdict(outcome), style=STYLES[Verdict.PASS if outcome.held else Verdict.FAIL])
                if outcome.finding.verdict is Verdict.SKIP and outcome.held:
                    cell.stylize(STYLES[Verdict.SKIP])
                result = folded(summary_of(outcome), max(10, room - name))
                table.add_row(cell, claim.id, _short(outcome.badge), Text(result), f"{outcome.seconds:.1f}")
        return table

    def reasons(self, outcomes: Iterable[Outcome]) -> None:
        """Print the reasons for unexpected verdicts and for skipped evidence."""
        for outcome in outcomes:
            unexamined = "not examined" in outcome.finding.why and not self.plan.broken
            if not outcome.held or unexamined:
                remedy = f" Remedy: {outcome.finding.remedy}." if outcome.finding.remedy else ""
                print_line(self.out, f"{outcome.claim.id}: {reason(outcome)}{remedy}", indent=6)


def print_line(out: Console, text: str, indent: int = 0) -> None:
    """Print one sentence: wrapped at the width of a terminal, on one line elsewhere."""
    lead = " " * indent
    if out.is_terminal:
        text = textwrap.fill(text, out.width, initial_indent=lead, subsequent_indent=lead or "    ")
        lead = ""
    out.print(Text(lead + text), soft_wrap=True)


def _short(badge: Badge) -> str:
    """Shorten a badge for a narrow column."""
    return "verified" if badge is Badge.VERIFIED else str(badge)


def _verdict(outcome: Outcome) -> str:
    if outcome.plan.broken:
        return "fails" if outcome.held and outcome.finding.verdict is Verdict.FAIL else str(outcome.finding.verdict)
    return str(outcome.finding.verdict)


def reason(outcome: Outcome) -> str:
    """Return one sentence on why the verdict is not the expected one."""
    if outcome.plan.broken and not outcome.crashed and outcome.finding.verdict is Verdict.PASS:
        return f"its negative control did not make it fail. The control: {outcome.claim.control}"
    if outcome.finding.verdict is Verdict.SKIP:
        return f"nothing could be examined, so nothing is asserted: {outcome.finding.why}"
    return outcome.finding.why[outcome.finding.why.find("not examined") :] if outcome.held else outcome.finding.why


def summary_of(outcome: Outcome) -> str:
    """Return the measurement closest to its bound and the number of proofs; for a control, the parts that failed."""
    finding, parts = outcome.finding, outcome.parts
    if outcome.crashed or finding.verdict is Verdict.SKIP:
        return finding.why
    failed = [part["id"] for part in parts if part["verdict"] == Verdict.FAIL]
    if outcome.plan.broken:
        return f"{len(failed)} of {len(parts)}: {', '.join(failed)}"
    if failed:
        return f"{', '.join(failed)}: {finding.numbers()}"
    skipped = sum(part["verdict"] == Verdict.SKIP for part in parts)
    parts = [part for part in parts if part["verdict"] != Verdict.SKIP]
    exact = sum(part["evidence"].get("kind") in ("exact", "exhaustive") for part in parts)
    proofs = f"{exact} exact" if exact else ""
    cases = sum(part["evidence"].get("cases", 0) for part in parts if isinstance(part["evidence"].get("cases"), int))
    numbers = finding.numbers() if finding.bound or finding.low is not None else ""
    pieces = [proofs, plural(cases, "case") if cases else "", numbers, f"{skipped} not examined" if skipped else ""]
    return "; ".join(piece for piece in pieces if piece)


def folded(text: str, width: int) -> str:
    """Break a text into lines of at most `width`; a measurement stays on the line of its bound if there is room."""
    pieces = text.replace("; ", ";\n").split("\n")
    kept = [piece.replace(" ", "\N{NO-BREAK SPACE}") if len(piece) <= width else piece for piece in pieces]
    return textwrap.fill(" ".join(kept), width).replace("\N{NO-BREAK SPACE}", " ")


def closing(outcomes: Sequence[Outcome], plan: Plan) -> str:
    """The last line."""
    count = {verdict: sum(o.finding.verdict is verdict for o in outcomes) for verdict in Verdict}
    crashed = sum(outcome.crashed for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if not outcome.held]
    seconds = f"{sum(outcome.seconds for outcome in outcomes):.0f} s of computing, seed {plan.seed}"
    if plan.broken:
        failing = count[Verdict.FAIL] - crashed
        return f"{failing} of {plural(len(outcomes) - count[Verdict.SKIP], 'control')} made the check fail; {seconds}."
    slow = f", {count[Verdict.SKIP]} skipped (--slow runs them)" if count[Verdict.SKIP] else ""
    verdict = "Every verdict is the expected one." if not wrong else f"{plural(len(wrong), 'verdict')} not as expected."
    lower = sum(o.badge is not o.claim.badge and o.finding.verdict is Verdict.PASS for o in outcomes)
    badges = f" The badge of {plural(lower, 'claim')} is lower than recorded: evidence is missing." if lower else ""
    return f"{count[Verdict.PASS]} pass, {count[Verdict.FAIL]} fail{slow}; {seconds}. {verdict}{badges}"


def print_list(ids: Sequence[str], out: Console) -> None:
    """Print the claims by chapter with their sources, then the sources without a claim."""
    claims = load_all()
    for chapter in CHAPTERS:
        rows = [claims[id] for id in ids if claims[id].chapter == chapter]
        if not rows:
            continue
        table = Table(
            Column("", no_wrap=True, width=max(map(len, ids))), "", title=f"{TITLES[chapter]} ({chapter})",
            title_justify="left", title_style="bold", box=None, show_header=False,
        )  # fmt: skip
        for claim in rows:
            slow = "  [slow]" if claim.slow else ""
            table.add_row(claim.id, Text(f"{claim.title}{slow}\n{', '.join(s.cite for s in claim.sources)}"))
        out.print(table)
    absent = [row for row in coverage() if row.verdict is Truth.ABSENT and not row.items]
    for row in absent:
        print_line(out, source_line(row))


def source_line(row: Source) -> str:
    """Return what a source states and the result of checking it."""
    errata = f" ({', '.join(row.errata)})" if row.errata else ""
    says = f"{row.says}: " if row.says != "-" else ""
    return f"{row.cite}: {says}{row.note or row.verdict}{errata}"
