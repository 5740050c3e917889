"""What a comparison found, for a person and for a machine."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from glassformer.anatomy.roles import Step
from glassformer.doctor.compare.devices import RoundingErrors
from glassformer.doctor.compare.parameters import ParameterGap
from glassformer.doctor.compare.scene import Explanation
from glassformer.finding import Finding

Verdict = Literal["same", "rounding", "differ"]


@dataclass
class Measured:
    """One case: the largest difference of the logits, relative to their size, in own precision and in float64."""

    name: str
    own: float | None
    exact: float | None
    bound: float
    why: str
    note: str = ""

    @property
    def agrees(self) -> bool | None:
        """None where nothing could be measured."""
        measured = self.exact if self.exact is not None else self.own
        return None if measured is None else measured <= self.bound

    def finding(self) -> Finding:
        name = f"same-logits:{self.name.replace(' ', '-').replace(',', '')}"
        measured = self.exact if self.exact is not None else self.own
        if measured is None:
            return Finding.skip(name, self.note)
        return Finding.judge(name, measured, self.bound, self.why, own_precision=self.own)


@dataclass
class Comparison:
    """Two models compared. `first` is the first activation where they differ, `explanation` the most likely reason."""

    names: tuple[str, str]
    verdict: Verdict
    measured: list[Measured]
    steps: list[Step] = field(default_factory=list)
    case: str | None = None
    """The case in which the activations were compared."""
    first: str | None = None
    difference: float | None = None
    explanation: Explanation | None = None
    depths: tuple[int, int] | None = None
    """How many attentions A and B run, where that differs."""
    parameters: list[ParameterGap] | None = None
    """Weights that differ; None where they do not go by the same names."""
    rounding: RoundingErrors | None = None
    """Rounding errors of both in their own precision, where devices were given."""
    notes: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return self.verdict != "differ"

    @property
    def convention(self) -> str | None:
        return None if self.explanation is None else self.explanation.convention

    @property
    def findings(self) -> list[Finding]:
        extra = [] if self.rounding is None else [self.rounding.finding]
        return [m.finding() for m in self.measured] + extra

    def to_dict(self) -> dict[str, Any]:
        return {
            "a": self.names[0],
            "b": self.names[1],
            "verdict": self.verdict,
            "first": self.first,
            "difference": _number(self.difference),
            "explanation": None
            if self.explanation is None
            else {**self.explanation.to_dict(), "residual": _number(self.explanation.residual)},
            "case": self.case,
            "findings": [f.to_dict() for f in self.findings],
            "steps": [
                {"name": s.name, "difference": _number(s.difference), "differs": s.differs, "absolved": s.absolved}
                for s in self.steps
            ],
            "parameters": None
            if self.parameters is None
            else [{**p.to_dict(), "difference": _number(p.difference)} for p in self.parameters],
            "notes": self.notes,
        }

    def _repr_html_(self) -> str:
        """Return the display in a notebook."""
        from glassformer.doctor.compare.page import display  # imports this module, so it cannot be imported at the top

        return display(self)

    def text(self) -> str:
        """The verdict first, then what it rests on."""
        lines = [f"A  {self.names[0]}", f"B  {self.names[1]}", "", self.sentence()]
        if self.explanation is not None:
            lines += [f"likely convention: {self.explanation.words}"]
            lines += [f"  {self.explanation.text}"]
            if math.isfinite(self.explanation.residual):
                lines += [f"  what that leaves unexplained: {self.explanation.residual:.1e}"]
        lines += ["", *self._table()]
        if self.first is not None:
            lines += ["", f"activations in order ({self.case}):", *self._around()]
        if self.parameters:
            more = f" (and {len(self.parameters) - 1} more)" if len(self.parameters) > 1 else ""
            effect = ", without effect on the logits" if self.same else ""
            first = self.parameters[0]
            lines += ["", f"first weight that differs{effect}: {first.name}, {first.text}{more}"]
        if self.rounding is not None:
            lines += ["", self.rounding.text()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def sentence(self) -> str:
        """The verdict in words."""
        worst = max((m.exact for m in self.measured if m.exact is not None), default=None)
        own = max((m.own for m in self.measured if m.own is not None), default=0.0)
        if self.verdict == "same":
            shrinks = f"; {own:.1e} in their own precision is rounding" if own > 0 and worst is not None else ""
            return "same: " + (f"{worst:.1e} apart in float64{shrinks}" if worst is not None else f"{own:.1e} apart")
        if self.verdict == "rounding":
            return f"same within rounding: {own:.1e} apart, of the size that float32 rounding makes (see the notes)"
        if self.rounding is not None and not self.rounding.sound:
            return f"they agree in float64, and one of them is too far from it in its own precision: {own:.1e} apart"
        if self.first is None:
            return (
                "they differ: "
                + (f"{worst:.1e} in float64" if worst is not None else f"{own:.1e}")
                + ", nowhere to be placed"
            )
        before = next((p.name for p in reversed(self._before()) if not p.differs), None)
        agreed = f"; everything before it agrees (last: {before})" if before else ""
        return f"they differ at {self.first}: {self.difference:.1e} apart, relative to its size{agreed}"

    def _before(self) -> list[Step]:
        names = [s.name for s in self.steps]
        return self.steps[: names.index(self.first)] if self.first in names else []

    def _table(self) -> list[str]:
        width = max((len(m.name) for m in self.measured), default=0)
        rows = [f"{'':<{width}}  own precision  float64"]
        for m in self.measured:
            own, exact = (f"{v:.1e}" if v is not None else "-" for v in (m.own, m.exact))
            apart = "rounding" if self.verdict == "rounding" else "differs"
            verdict = {True: "agrees", False: apart, None: "could not be asked"}[m.agrees]
            rows.append(f"{m.name:<{width}}  {own:>13}  {exact:>7}  {verdict}{': ' + m.note if m.note else ''}")
        return rows

    def _around(self, before: int = 4, after: int = 3) -> list[str]:
        names = [s.name for s in self.steps]
        at = names.index(self.first) if self.first in names else 0
        shown = self.steps[max(at - before, 0) : at + after + 1]
        width = max(len(s.name) for s in shown)
        marks = {(False, False): "", (True, False): "differs", (True, True): "differs, without consequence"}
        rows = [f"  {s.name:<{width}}  {s.difference:.1e}  {marks[s.differs, s.absolved]}".rstrip() for s in shown]
        return [r + "  <- first" if s.name == self.first else r for r, s in zip(rows, shown, strict=True)]


def _number(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
