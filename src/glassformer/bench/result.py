"""What was measured: rounds to medians, spread and ratios, and all of it as JSON."""

import statistics
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1


@dataclass
class Row:
    """One contender in one group."""

    name: str
    precision: str
    ours: bool
    rounds: list[float] = field(default_factory=list)
    """Units per second, one per round; of start-up seconds."""
    version: str = ""
    load: float | None = None
    """Seconds to load and warm up, of start-up none."""
    first: list[float] = field(default_factory=list)
    """Decoding only: seconds to the first token, the prompt read."""
    ids: list[list[Any]] = field(default_factory=list)
    """Greedy ids, or losses of training steps."""
    agrees: str = ""
    """In words: the same ids, or where they part."""
    died: str = ""
    """Its last line, when it did."""

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


@dataclass
class Group:
    """Contenders that ran in turn and may be compared: one precision, one setting."""

    precision: str
    unit: str
    setting: str = ""
    rows: list[Row] = field(default_factory=list)
    bandwidth: Row | None = None
    """Bytes per second, in turn with the contenders."""
    touched: float = 0.0
    """Bytes of weights per step of a batch."""
    batch: int = 1
    fewer_is_better: bool = False
    compared: bool = True
    """False: rows that are parts of others, with no ratio between them."""

    def ours(self) -> Row | None:
        """Our best row."""
        return self._best([row for row in self.rows if row.ours])

    def best_peer(self) -> Row | None:
        return self._best([row for row in self.rows if not row.ours])

    def _best(self, rows: list[Row]) -> Row | None:
        known = [row for row in rows if row.measured]
        if not known:
            return None
        return (min if self.fewer_is_better else max)(known, key=lambda row: row.median)

    def ratio(self, row: Row, other: Row | None) -> float | None:
        """How many times as fast as `other` a row is."""
        if other is None or not row.measured or not self.compared:
            return None
        return other.median / row.median if self.fewer_is_better else row.median / other.median

    def of_limit(self, row: Row) -> float | None:
        """Share of the measured bandwidth that reading the weights once per step takes."""
        if self.bandwidth is None or not self.bandwidth.measured or not row.measured or not self.touched:
            return None
        return row.median / self.batch * self.touched / self.bandwidth.median


def number(value: float) -> str:
    """Four digits that mean something."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def row_dict(group: Group, row: Row) -> dict[str, Any]:
    known = row.measured
    return {
        "name": row.name,
        "precision": row.precision,
        "ours": row.ours,
        "version": row.version,
        "median": row.median if known else None,
        "low": min(row.rounds) if known else None,
        "high": max(row.rounds) if known else None,
        "spread": row.spread if known else None,
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
        "weight_bytes_per_step": group.touched or None,
        "bandwidth_bytes_per_second": read.median if read is not None and read.measured else None,
        "rows": [row_dict(group, row) for row in group.rows],
    }


@dataclass
class Result:
    """All groups of one run, with the machine and who was missing."""

    plan: dict[str, Any]
    machine: dict[str, Any]
    missing: dict[str, str]
    groups: list[Group]
    findings: list[Any] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Nobody died and everybody ran the same model; a missed target is no fault of the measurement."""
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
