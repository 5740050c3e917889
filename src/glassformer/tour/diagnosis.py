"""The diagnoses of the tour: the trained model, and a copy of it without its causal mask."""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass

from glassformer.doctor import Report, diagnose
from glassformer.finding import Finding
from glassformer.model import DecoderLM, Model

REMEDY = "glass doctor FOLDER runs all probes"


@dataclass(frozen=True)
class DiagnosedModel:
    """The doctor's report on one model, and whether the report is correct."""

    name: str
    report: Report
    finding: Finding
    """Passes if the report is correct."""
    seconds: float


def without_mask(model: Model) -> Model:
    """Return a copy without the causal mask: every position attends to later tokens."""
    assert isinstance(model, DecoderLM)
    broken = copy.deepcopy(model)
    broken.decoder.causal = False
    return broken


def diagnose_models(model: Model) -> Iterator[DiagnosedModel]:
    """Diagnose the trained model and a copy without its causal mask. The doctor does not know which is which."""
    yield _diagnose("the trained model", model, None)
    yield _diagnose("the same model without its causal mask", without_mask(model), "causal_leak")


def _diagnose(name: str, model: Model, expected: str | None) -> DiagnosedModel:
    began = time.perf_counter()
    report = diagnose(model, quick=True, name=name)
    found = [diagnosis.id for diagnosis in report.diagnoses]
    if expected is None:
        why = ", ".join(found) or f"{report.counts['pass']} probes passed and none failed"
        finding = Finding.judge("the doctor finds no bug in the trained model", len(found), 0, why, REMEDY)
    else:
        why = f"the causal mask was removed; the first diagnosis is {found[0] if found else 'missing'}"
        finding = Finding.judge("the doctor finds the missing causal mask", found[:1] != [expected], 0, why, REMEDY)
    return DiagnosedModel(name, report, finding, time.perf_counter() - began)
