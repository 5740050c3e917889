"""The only result type: what was measured, against which bound, why that bound, and what to do about it.

Checks, claims, the doctor, weight verification, the command line and the studio all speak in Findings.
"""

import enum
import math
from dataclasses import dataclass, field
from typing import Any


class Verdict(enum.StrEnum):
    """The result of a check: pass, fail, or skip."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"
    """Could not be examined: nothing is asserted either way. Never counts as a pass."""


@dataclass(frozen=True)
class Finding:
    """One examined statement. `low <= measured <= bound` is a pass, where either end may be open; a NaN never is."""

    id: str
    verdict: Verdict
    measured: float | None = None
    bound: float | None = None
    why: str = ""
    """Why this bound; for a skip, why nothing could be measured."""
    remedy: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    """Plain values (numbers, texts, lists) that let a reader repeat the measurement."""
    low: float | None = None
    """The least that will do, where there is one."""

    @classmethod
    def judge(cls, id: str, measured: float, bound: float, why: str, remedy: str = "", **evidence: Any) -> "Finding":
        """Compare a measurement with its bound."""
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
        """Compare a measurement with a band; None leaves an end open."""
        passed = math.isfinite(measured) and (low is None or low <= measured) and (high is None or measured <= high)
        return cls(id, Verdict.PASS if passed else Verdict.FAIL, float(measured), high, why, remedy, evidence, low)

    @classmethod
    def skip(cls, id: str, why: str, remedy: str = "") -> "Finding":
        return cls(id, Verdict.SKIP, why=why, remedy=remedy)

    @property
    def passed(self) -> bool:
        return self.verdict is Verdict.PASS

    def text(self) -> str:
        """One line: `pass  engine-equals-oracle  3.1e-15 <= 1e-10  (why)`; a failure adds its remedy."""
        numbers = self.numbers()
        line = f"{self.verdict:<4}  {self.id}" + (f"  {numbers}" if numbers else "")
        line += f"  ({self.why})" if self.why else ""
        return line + (f"\n      remedy: {self.remedy}" if self.remedy and not self.passed else "")

    def numbers(self) -> str:
        """`3.1e-15 <= 1e-10`, `0.03 <= 0.11`, `0.5 > 0.3`: the measurement and its bound."""
        if self.measured is None:
            return ""
        text = f"{self.measured:.3g}"
        if self.bound is not None:
            relation = "<=" if self.measured <= self.bound else ">" if self.measured > self.bound else "is not <="
            text += f" {relation} {self.bound:.3g}"
        if self.low is not None:
            relation = "<=" if self.low <= self.measured else ">" if self.low > self.measured else "is not <="
            text = f"{self.low:.3g} {relation} {text}"
        return text

    def to_dict(self) -> dict[str, Any]:
        """JSON form. NaN and infinities become text, which JSON can carry."""
        return {
            "id": self.id,
            "verdict": str(self.verdict),
            "measured": _json_number(self.measured),
            "bound": _json_number(self.bound),
            **({} if self.low is None else {"low": _json_number(self.low)}),
            "why": self.why,
            "remedy": self.remedy,
            "evidence": self.evidence,
        }


def _json_number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
