"""The part of the tour in which theory is proven and a broken model is diagnosed. Data, no printing."""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from glassformer.doctor import Report, diagnose
from glassformer.finding import Finding
from glassformer.model import DecoderLM, Model
from glassformer.theory.claims.formulas import readable
from glassformer.theory.claims.run import Outcome
from glassformer.theory.claims.run import Plan as ClaimPlan
from glassformer.theory.claims.run import run as run_claims

CLAIMS = ("rope-relative", "orthogonal-inputs-fixed-point")
"""What the model of the tour relies on, and what a textbook has wrong; each takes a second or two."""
HOW = "glass doctor FOLDER examines it in full"


@dataclass(frozen=True)
class Proof:
    """A claim that was run, and its negative control."""

    whole: Outcome
    broken: Outcome
    """The same check with its hypothesis broken: a check that cannot fail proves nothing."""

    @property
    def id(self) -> str:
        return self.whole.claim.id

    @property
    def title(self) -> str:
        return readable(self.whole.claim.title)

    @property
    def control(self) -> str:
        """What the negative control breaks."""
        return readable(self.whole.claim.control)

    @property
    def turned(self) -> int:
        """Pieces of evidence that fail once it is broken."""
        return _failures(self.broken)

    @property
    def mistake(self) -> tuple[str, str, str] | None:
        """A source that has it wrong, what it says, and why that fails."""
        wrong = next((erratum for erratum in self.whole.claim.errata if erratum.flaw == "wrong"), None)
        return None if wrong is None else (wrong.sources[-1], readable(wrong.said), readable(wrong.fails))

    @property
    def findings(self) -> tuple[Finding, Finding]:
        whole, broken = self.whole, self.broken
        why = f"{len(whole.parts)} pieces of evidence, {whole.badge}: glass check {self.id} --explain"
        wrong = max(_failures(whole), int(not whole.held))
        turns = f"with the hypothesis broken {self.turned} of {len(broken.parts)} pieces fail, as they must"
        return (
            Finding.judge(f"claim: {self.id}", wrong, 0, why, whole.finding.why),
            Finding.judge(f"its control fails: {self.id}", not broken.held, 0, turns, broken.finding.why),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"claim": self.whole.to_dict(), "control": self.broken.to_dict()}


def _failures(outcome: Outcome) -> int:
    return sum(part["verdict"] == "fail" for part in outcome.parts)


def prove(ids: tuple[str, ...] = CLAIMS) -> Iterator[Proof]:
    """Each claim, whole and broken."""
    for id in ids:
        (whole,), (broken,) = run_claims([id]), run_claims([id], ClaimPlan(broken=True))
        yield Proof(whole, broken)


@dataclass(frozen=True)
class Examined:
    """What the doctor said of one model."""

    name: str
    report: Report
    finding: Finding
    """Whether that is right."""
    seconds: float


def without_mask(model: Model) -> Model:
    """A copy whose causal mask is taken off: every place sees the future."""
    assert isinstance(model, DecoderLM)
    sick = copy.deepcopy(model)
    sick.decoder.causal = False
    return sick


def consult(model: Model) -> Iterator[Examined]:
    """The doctor on the trained model, and on the same one without its causal mask; it is told of neither."""
    yield _examine("the trained model", model, None)
    yield _examine("the same model without its causal mask", without_mask(model), "causal_leak")


def _examine(name: str, model: Model, sick_of: str | None) -> Examined:
    began = time.perf_counter()
    report = diagnose(model, quick=True, name=name)
    named = [diagnosis.id for diagnosis in report.diagnoses]
    if sick_of is None:
        why = ", ".join(named) or f"{report.counts['pass']} probes, and none fails"
        finding = Finding.judge("the doctor finds nothing in the trained model", len(named), 0, why, HOW)
    else:
        why = f"the mask was taken off behind its back; named first: {named[0] if named else 'nothing'}"
        finding = Finding.judge("the doctor names the missing mask", named[:1] != [sick_of], 0, why, HOW)
    return Examined(name, report, finding, time.perf_counter() - began)
