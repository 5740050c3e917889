"""The error for a file that was written and computes something else than the model."""

from pathlib import Path

from glassformer.finding import Finding, Verdict
from glassformer.weights.errors import WeightsError


class UnverifiedError(WeightsError):
    """The written file does not compute what the model computes, so it was discarded."""

    def __init__(self, path: Path, findings: list[Finding]):
        failed = "; ".join(f"{f.id} {f.numbers()} ({f.why})" for f in findings if f.verdict is Verdict.FAIL)
        super().__init__(f"{path} was not written, because what was written differs from the model: {failed}.")
        self.findings = findings
