"""Results: medians, spreads and ratios of the measured rounds, and all of them as JSON.

A figure that other work on the machine made meaningless is not reported; `disturbed` gives the reason.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

FORMAT = 2
"""2: rows and groups have `disturbed`, and their figures are null where it gives a reason."""
LARGEST_SPREAD = 0.5
"""Spread of a contender's rounds above which its median is not printed: other work disturbed them."""
ENOUGH_ROUNDS = 3
"""With fewer rounds, disturbance cannot be detected, and targets are not judged."""
AGREE = 0.1
"""The fastest three rounds of reading memory must agree within this fraction."""
SAME_MACHINE = 0.2
"""The bandwidth of one group may lie below that of another in the same run by at most this fraction."""


@dataclass
class Row:
    """One contender in one group."""

    name: str
    precision: str
    ours: bool
    rounds: list[float] = field(default_factory=list)
    """Units per second, one per round; for start-up, seconds."""
    version: str = ""
    load: float | None = None
    """Seconds to load and warm up; None for start-up."""
    first: list[float] = field(default_factory=list)
    """Decoding only: seconds to the first token, including the prompt."""
    ids: list[list[Any]] = field(default_factory=list)
    """Greedy ids, or losses of training steps."""
    agrees: str = ""
    """Text: the same ids, or where they differ."""
    died: str = ""
    """Its last line of output, if the process died."""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.rounds) - min(self.rounds)) / self.median

    @property
    def measured(self) -> bool:
        return bool(self.rounds) and not self.died

    @property
    def disturbed(self) -> str:
        """Why the median is not meaningful; empty if it is."""
        if not self.measured or self.spread <= LARGEST_SPREAD:
            return ""
        return f"disturbed: its rounds spread by {self.spread:.0%}, more than {LARGEST_SPREAD:.0%}"


class Bandwidth(Row):
    """Memory bandwidth, in bytes per second. The fastest rounds define the limit, so these must agree."""

    fastest_in_run: float = 0.0
    """The fastest of all groups of the run. The machine is the same, so no group may be much slower."""

    @property
    def best(self) -> float:
        return max(self.rounds)

    @property
    def disturbed(self) -> str:
        if not self.measured:
            return ""
        if len(self.rounds) < ENOUGH_ROUNDS:
            return f"fewer than {ENOUGH_ROUNDS} rounds cannot show whether they were disturbed"
        fastest = sorted(self.rounds)[-ENOUGH_ROUNDS:]
        if fastest[0] < (1 - AGREE) * fastest[-1]:
            speeds = ", ".join(f"{speed / 1e9:.1f}" for speed in fastest)
            return f"disturbed: the fastest rounds of reading memory differ ({speeds} GB/s)"
        if self.best < (1 - SAME_MACHINE) * self.fastest_in_run:
            here, elsewhere = f"{self.best / 1e9:.1f} GB/s", f"{self.fastest_in_run / 1e9:.1f} GB/s"
            return f"disturbed: memory was read at {here}, and at {elsewhere} in another part of the same run"
        return ""


def compare_bandwidths(groups: "list[Group]") -> None:
    """Store the fastest bandwidth of the run in each group's bandwidth."""
    read = [group.bandwidth for group in groups if group.bandwidth is not None and group.bandwidth.measured]
    for one in read:
        one.fastest_in_run = max(other.best for other in read)


@dataclass
class Group:
    """Contenders that ran in turns and can be compared: one precision, one setting."""

    precision: str
    unit: str
    setting: str = ""
    rows: list[Row] = field(default_factory=list)
    bandwidth: Bandwidth | None = None
    """Bytes per second, measured in turns with the contenders."""
    weight_bytes: float = 0.0
    """Bytes of weights per step of a batch."""
    batch: int = 1
    fewer_is_better: bool = False
    compared: bool = True
    """False if rows are parts of others, with no ratio between them."""

    def ours(self) -> Row | None:
        """Return our best row."""
        return self._best([row for row in self.rows if row.ours])

    def best_peer(self) -> Row | None:
        return self._best([row for row in self.rows if not row.ours])

    def _best(self, rows: list[Row]) -> Row | None:
        known = [row for row in rows if row.measured]
        if not known:
            return None
        return (min if self.fewer_is_better else max)(known, key=lambda row: row.median)

    def ratio(self, row: Row, other: Row | None) -> float | None:
        """Return how many times as fast as `other` a row is; None if either was disturbed."""
        if other is None or not row.measured or not self.compared or row.disturbed or other.disturbed:
            return None
        return other.median / row.median if self.fewer_is_better else row.median / other.median

    def of_limit(self, row: Row) -> float | None:
        """Return the share of the bandwidth that reading the weights once per step takes; None if it is unknown."""
        share = self.share(row)
        return None if share is None or self.why_no_share(row) else share

    def share(self, row: Row) -> float | None:
        """Return the share as measured, meaningful or not."""
        if self.bandwidth is None or not self.bandwidth.measured or not row.measured or not self.weight_bytes:
            return None
        return row.median / self.batch * self.weight_bytes / self.bandwidth.best

    def why_no_share(self, row: Row) -> str:
        """Return why the share of the bandwidth is not meaningful; empty if it is."""
        share = self.share(row)
        if share is None or self.bandwidth is None:
            return "our contender or the bandwidth measurement did not run"
        if reason := row.disturbed or self.bandwidth.disturbed:
            return reason
        if share > 1 + AGREE:
            return f"{share:.0%} of the bandwidth: reading memory was disturbed, or the weights fit in a cache"
        return ""


def number(value: float) -> str:
    """Return a number with four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def row_dict(group: Group, row: Row) -> dict[str, Any]:
    known = row.measured and not row.disturbed
    return {
        "name": row.name,
        "precision": row.precision,
        "ours": row.ours,
        "version": row.version,
        "median": row.median if known else None,
        "low": min(row.rounds) if row.measured else None,
        "high": max(row.rounds) if row.measured else None,
        "spread": row.spread if row.measured else None,
        "disturbed": row.disturbed or None,
        "rounds": row.rounds,
        "ratio_to_ours": group.ratio(row, group.ours()),
        "ratio_to_best_peer": group.ratio(row, group.best_peer()),
        "of_bandwidth": group.of_limit(row),
        "first_token_seconds": statistics.median(row.first) if row.first else None,
        "load_seconds": row.load,
        "agrees": row.agrees,
        "died": row.died or None,
    }


def group_dict(group: Group) -> dict[str, Any]:
    read = group.bandwidth
    return {
        "precision": group.precision,
        "setting": group.setting,
        "unit": group.unit,
        "batch": group.batch,
        "weight_bytes_per_step": group.weight_bytes or None,
        "bandwidth_bytes_per_second": (
            read.best if read is not None and read.measured and not read.disturbed else None
        ),
        "bandwidth_rounds": [] if read is None else read.rounds,
        "bandwidth_disturbed": (read.disturbed or None) if read is not None else None,
        "rows": [row_dict(group, row) for row in group.rows],
    }


@dataclass
class Result:
    """All groups of one run, with the machine and the missing contenders."""

    plan: dict[str, Any]
    machine: dict[str, Any]
    missing: dict[str, str]
    groups: list[Group]
    findings: list[Any] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """All contenders exited cleanly and ran the same model; a missed target does not make a run unsound."""
        return not any(f.verdict == "fail" for f in self.findings if not f.id.startswith("target"))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "plan": self.plan,
            "machine": self.machine,
            "missing": self.missing,
            "groups": [group_dict(group) for group in self.groups],
            "findings": [finding.to_dict() for finding in self.findings],
        }
