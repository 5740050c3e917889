"""The tour for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from glassformer import tour


def print_tour(sheet: Any) -> int:
    """Print every stop of the tour as it is reached. Returns 0 when everything held, 1 otherwise."""
    console = Console()
    console.rule("1  What a model costs: GPT-2 small")
    console.print(sheet.text(), highlight=False, markup=False, soft_wrap=True)
    console.rule("2  The engine against an oracle written from the formulas")
    held = True
    for finding in tour.engine_against_oracle():
        held &= finding.passed
        console.print(f"{finding.verdict}  {finding.id:<55} {finding.measured:.1e}", highlight=False, markup=False)
    console.print(f"The bound is {tour.BOUND:.0e}: {tour.WHY}.", highlight=False)
    console.rule("3  The cache changes the time and nothing else")
    races = Table("tokens", "recomputed", "cached", "speed-up", "same tokens")
    for race in tour.cache_races():
        held &= race.same_tokens
        times = (f"{race.recomputed_seconds:.2f} s", f"{race.cached_seconds:.2f} s")
        races.add_row(str(race.length), *times, f"{race.speed_up:.1f} x", "yes" if race.same_tokens else "NO")
    console.print(races)
    finding = tour.ragged_batch_equals_rows_alone()
    held &= finding.passed
    console.print(finding.text(), highlight=False, markup=False, soft_wrap=True)
    console.rule("4  Every sampler on one distribution, in percent")
    rows = tour.samplers_on_one_distribution()
    table = Table(Column("sampler", no_wrap=True), *map(str, range(len(rows[0].probabilities))), "kept", "nats")
    for row in rows:
        cells = [f"{100 * p:.1f}" if p else "·" for p in row.probabilities]
        table.add_row(row.name, *cells, str(row.kept), f"{row.entropy:.2f}")
    console.print(table)
    console.print("Token 2 was seen before; nats measure how undecided a distribution is.", highlight=False)
    console.print("Everything held." if held else "Something did NOT hold: see above.")
    return 0 if held else 1
