"""The only result type: what was measured, its bound, the reason for the bound, and the remedy if it fails.

Claims, the doctor, weight verification, the command line and the studio all report Findings.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Any


class Verdict(enum.StrEnum):
    """The outcome of a check."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"
    """It could not be measured. A skip never counts as a pass."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. It passes if `low <= measured <= bound`; either limit may be None. NaN never passes."""

    id: str
    verdict: Verdict
    measured: float | None = None
    bound: float | None = None
    why: str = ""
    """The reason for the bound; for a skip, the reason why nothing could be measured."""
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Plain values (numbers, strings, lists) with which a reader can repeat the measurement."""
    low: float | None = None
    """The lower bound, if there is one."""

    @classmethod
    def judge(cls, id: str, measured: float, bound: float, why: str, remedy: str = "", **evidence: Any) -> "Finding":
        """Return a Finding that passes if measured <= bound."""
        passed = math.isfinite(measured) and measured <= bound
        return cls(id, Verdict.PASS if passed else Verdict.FAIL, float(measured), float(bound), why, remedy, evidence)

    @classmethod
    def within(
        cls,
        id: str,
        measured: float,
        low: float | None,
        high: float | None,
        why: str,
        remedy: str = "",
        **evidence: Any,
    ) -> "Finding":
        """Return a Finding that passes if low <= measured <= high. None means no limit."""
        passed = math.isfinite(measured) and (low is None or low <= measured) and (high is None or measured <= high)
        return cls(id, Verdict.PASS if passed else Verdict.FAIL, float(measured), high, why, remedy, evidence, low)

    @classmethod
    def skip(cls, id: str, why: str, remedy: str = "") -> "Finding":
        """Return a Finding that could not be measured."""
        return cls(id, Verdict.SKIP, why=why, remedy=remedy)

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASS

    def text(self) -> str:
        """Return one line, `pass  engine-equals-oracle  3.1e-15 <= 1e-10  (why)`; a failure adds its remedy."""
        numbers = self.numbers()
        line = f"{self.verdict:<4}  {self.id}" + (f"  {numbers}" if numbers else "")
        line += f"  ({self.why})" if self.why else ""
        return line + (f"\n      remedy: {self.remedy}" if self.remedy and not self.passed else "")

    def numbers(self) -> str:
        """Return the measurement compared with its bounds: `3.1e-15 <= 1e-10`, or `0.5 > 0.3` if it fails.

        A failure that no limit explains had to be equal to the bound: `0.5, not 1`.
        """
        if self.measured is None:
            return ""
        text = f"{self.measured:.3g}"
        if self.verdict is Verdict.FAIL and self.bound is not None and self.low is None and self.measured <= self.bound:
            return f"{text}, not {self.bound:.3g}"
        if self.bound is not None:
            relation = "<=" if self.measured <= self.bound else ">" if self.measured > self.bound else "is not <="
            text += f" {relation} {self.bound:.3g}"
        if self.low is not None:
            relation = "<=" if self.low <= self.measured else ">" if self.low > self.measured else "is not <="
            text = f"{self.low:.3g} {relation} {text}"
        return text

    def _repr_html_(self) -> str:
        """Return the display in a notebook: verdict, numbers, reason, and the evidence below."""
        from glassformer.pages.display import render

        evidence = dict(self.evidence)
        parts = [_row(part) for part in evidence.pop("parts", ())]
        badge = evidence.get("badge", "") if self.passed else ""
        values = [
            (name, text if len(text := str(value)) <= 300 else f"{text[:299]}…") for name, value in evidence.items()
        ]
        return render("display_finding.html", finding=self, parts=parts, badge=badge, evidence=values)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON. NaN and infinities become strings, because JSON has no such numbers."""
        return {
            "id": self.id,
            "verdict": str(self.verdict),
            "measured": _json_number(self.measured),
            "bound": _json_number(self.bound),
            **({} if self.low is None else {"low": _json_number(self.low)}),
            "why": self.why,
            "remedy": self.remedy,
            "evidence": _json_value(self.evidence),
        }


def _row(part: dict[str, Any]) -> dict[str, Any]:
    """Return one piece of evidence, which is a Finding as a dict, for a table."""
    limits: dict[str, Any] = {n: None if part.get(n) is None else float(part[n]) for n in ("measured", "bound", "low")}
    return {**part, "numbers": Finding(part["id"], Verdict(part["verdict"]), **limits).numbers()}


def _json_value(value: Any) -> Any:
    """Return a value in which NaN and infinities are strings, also inside lists and dictionaries."""
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in value]
    return _json_number(value) if isinstance(value, float) else value


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
