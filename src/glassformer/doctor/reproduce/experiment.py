"""What an experiment may use, and the lines that most of them end with."""

from dataclasses import dataclass
from typing import Any

from glassformer.doctor.reproduce.calls import Calls
from glassformer.doctor.subject.subject import Subject
from glassformer.finding import Finding

SAME = "bound = 1e-6 * float(a.square().mean().sqrt())  # the same computation: equal to the bit"
APART = "measured = float((a - b).abs().max())"


@dataclass
class Experiment:
    """What an experiment may use: the subject, the finding, and how the model is called."""

    subject: Subject
    finding: Finding
    calls: Calls

    def get(self, name: str, default: Any) -> Any:
        value = self.finding.evidence.get(name)
        return default if value is None else value

    @property
    def rounding(self) -> str:
        """The bound for results of other shapes: what the doctor measured, or more."""
        known = self.finding.bound or 0.0
        return (
            f"bound = max({known:.3g}, 1e-5 * float(b.square().mean().sqrt()))  # rounding between shapes stays below"
        )

    @property
    def pad(self) -> int:
        return 0 if self.subject.pad is None else self.subject.pad

    def needs(self, name: str) -> str:
        value = getattr(self.subject.interface, name)
        if value is None:
            raise LookupError(f"the model takes no {name}")
        return str(value)
