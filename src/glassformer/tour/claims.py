"""The claims of the tour: each is run as stated and with its negative control."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from glassformer.finding import Finding
from glassformer.theory.claims.formulas import readable
from glassformer.theory.claims.run import Outcome
from glassformer.theory.claims.run import Plan as ClaimPlan
from glassformer.theory.claims.run import run as run_claims

CLAIMS = ("rope-relative", "orthogonal-inputs-fixed-point")
"""A claim that the model of the tour relies on, and one that a textbook gets wrong. Each takes a second or two."""


@dataclass(frozen=True)
class CheckedClaim:
    """A claim that was run, and its negative control."""

    outcome: Outcome
    control_outcome: Outcome
    """The outcome with the hypothesis broken: a check that cannot fail proves nothing."""

    @property
    def id(self) -> str:
        return self.outcome.claim.id

    @property
    def title(self) -> str:
        return readable(self.outcome.claim.title)

    @property
    def control(self) -> str:
        """What the negative control breaks."""
        return readable(self.outcome.claim.control)

    @property
    def control_failures(self) -> int:
        """How many pieces of evidence fail when the hypothesis is broken."""
        return _failures(self.control_outcome)

    @property
    def erratum(self) -> tuple[str, str, str] | None:
        """A source that is wrong, its statement, and why that fails; None if no source is wrong."""
        wrong = next((erratum for erratum in self.outcome.claim.errata if erratum.flaw == "wrong"), None)
        return None if wrong is None else (wrong.sources[-1], readable(wrong.states), readable(wrong.fails))

    @property
    def findings(self) -> tuple[Finding, Finding]:
        """Whether the claim holds, and whether its negative control fails."""
        outcome, control = self.outcome, self.control_outcome
        why = f"{len(outcome.parts)} pieces of evidence, {outcome.badge}: glass check {self.id} --explain"
        failures = max(_failures(outcome), int(not outcome.held))
        broken = f"with the hypothesis broken, {self.control_failures} of {len(control.parts)} pieces must and do fail"
        return (
            Finding.judge(f"claim: {self.id}", failures, 0, why, outcome.finding.why),
            Finding.judge(f"control fails: {self.id}", not control.held, 0, broken, control.finding.why),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"claim": self.outcome.to_dict(), "control": self.control_outcome.to_dict()}


def _failures(outcome: Outcome) -> int:
    return sum(part["verdict"] == "fail" for part in outcome.parts)


def check_claims(ids: tuple[str, ...] = CLAIMS) -> Iterator[CheckedClaim]:
    """Run each claim and its negative control."""
    for id in ids:
        (outcome,), (control,) = run_claims([id]), run_claims([id], ClaimPlan(broken=True))
        yield CheckedClaim(outcome, control)
