"""Print a result: one table per group, and a sentence per target."""

import io
from typing import IO, TYPE_CHECKING

from glassformer.bench.judge import sentence
from glassformer.bench.result import Group, Result, Row, number

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160
SHORT = 80
"""Characters of a last line in the table; it is printed in full below."""
BUSY = 0.3
"""Load average per core above which the machine is reported as busy."""
UNKNOWN = "-"
"""Printed instead of a figure that the spread of the rounds, or a disturbed bandwidth, makes meaningless."""


def show(result: Result, file: IO[str] | None = None) -> None:
    """Print a result: with rich's lines on a terminal, otherwise plain columns, whose lines end in no blanks."""
    from rich.console import Console

    console = Console(file=file, highlight=False, soft_wrap=True)
    if console.is_terminal:
        _print(result, console)
        return
    plain = io.StringIO()
    _print(result, Console(file=plain, highlight=False, soft_wrap=True, width=max(console.width, PLAIN_WIDTH)))
    print("\n".join(line.rstrip() for line in plain.getvalue().splitlines()), file=file)


def _print(result: Result, console: "Console") -> None:
    machine, plan = result.machine, result.plan
    threads = f"{plan['threads']} thread{'s' * (plan['threads'] != 1)}"
    device = f"{machine['gpu']}, " if machine.get("gpu") else ""
    console.print(
        f"{plan['task']}: {device}{machine['processor']}, {threads}, {' '.join(machine['flags'])}",
        markup=False,
    )
    if machine["load_average"] and machine["load_average"][0] > BUSY * machine["cores"]:
        busy = machine["load_average"][0]
        console.print(f"the machine was busy at the start (load {busy}): measure again on a quiet machine.")
    for group in result.groups:
        _table(console, group)
    for name, why in result.missing.items():
        console.print(f"{name}: not measured, {why}", markup=False)
    for finding in result.findings:
        text = sentence(finding) if finding.id.startswith("target") else finding.text()
        if finding.id.startswith("target") or not finding.passed:
            console.print(text, markup=False)


def _table(console: "Console", group: Group) -> None:
    from rich import box
    from rich.table import Table

    heading = ", ".join(filter(None, (group.setting, group.precision, group.unit)))
    table = Table(title=heading, title_justify="left", box=box.SIMPLE if console.is_terminal else None)
    table.add_column("contender")
    for column in ("median", "lowest", "highest", "spread", "to ours", "to best peer"):
        table.add_column(column, justify="right")
    has_limit = group.bandwidth is not None and group.bandwidth.measured
    if has_limit:
        table.add_column("of bandwidth", justify="right")
    table.add_column("remarks")
    for row in sorted(group.rows, key=lambda row: _rank(group, row)):
        table.add_row(*_cells(group, row, has_limit))
    console.print()
    console.print(table)
    if has_limit and group.bandwidth is not None:
        read = group.bandwidth
        text = f"not measured: {read.disturbed}" if read.disturbed else f"{read.best / 1e9:.1f} GB/s in the best round"
        console.print(f"memory bandwidth: {text}", markup=False)


def _rank(group: Group, row: Row) -> tuple[bool, float]:
    if not row.measured:
        return True, 0.0
    return False, row.median if group.fewer_is_better else -row.median


def _cells(group: Group, row: Row, has_limit: bool) -> list[str]:
    if not row.measured:
        return [row.name, *([""] * (7 if has_limit else 6)), f"died: {row.died[:SHORT]}" if row.died else row.agrees]
    shares = [group.ratio(row, group.ours()), group.ratio(row, group.best_peer())]
    median = UNKNOWN if row.disturbed else number(row.median)
    cells = [row.name, median, *map(number, (min(row.rounds), max(row.rounds))), f"{row.spread:.0%}"]
    cells += [_blank(group) if share is None else f"{share:.3f}" for share in shares]
    if has_limit:
        share = group.of_limit(row)
        cells.append(UNKNOWN if share is None else f"{share:.0%}")
    return [*cells, "; ".join(filter(None, (row.disturbed, row.agrees)))]


def _blank(group: Group) -> str:
    """Return what is printed for a missing ratio: `-` if a figure is not meaningful, else nothing."""
    return UNKNOWN if group.compared and any(row.disturbed for row in group.rows) else ""
