"""Doctor view: diagnose a model of the studio."""

from typing import TYPE_CHECKING, Any

from glassformer.studio import schema
from glassformer.studio.events import Emit
from glassformer.studio.models import ModelStore

if TYPE_CHECKING:
    from glassformer.finding import Finding

LEAK_LENGTH = 12


def examine(models: ModelStore, request: schema.Doctor, emit: Emit) -> None:
    """Emit `progress` and `finding` while probes run, then each `diagnosis`, then `done` with the leak matrix.

    A separate copy of the model is examined: some probes modify a large model in place and restore it, and other
    requests may be using the shared one. The time limit is that of the job, which is checked at each torch call.
    """
    from glassformer.doctor import diagnose
    from glassformer.theory.claims.claim import plain

    loaded = models.load_copy(request.model)

    def report_progress(what: str, done: int, of: int) -> None:
        emit("progress", {"what": what, "done": done, "of": of})

    def report_finding(finding: "Finding", family: str) -> None:
        emit("finding", {**plain(finding.to_dict()), "family": family})

    report = diagnose(loaded.model, quick=request.quick, tell=report_progress, found=report_finding, name=loaded.name)
    for diagnosis in report.diagnoses:
        emit("diagnosis", {**plain(diagnosis.to_dict()), "location": diagnosis.where(), "text": diagnosis.text()})
    leak = report.pictures.get("leak") or leak_matrix(loaded.model)
    facts = {"healthy": report.healthy, "notes": list(report.notes), "seconds": report.seconds, "text": report.text()}
    emit("done", {**facts, "leak": plain(leak)})


def leak_matrix(model: Any) -> list[list[float]] | None:
    """Return how much the output at position i changes when only the input at j changes; None for an encoder."""
    from glassformer.doctor.probes.causality import leak_matrix as measure
    from glassformer.doctor.subject.adapt import subject_of

    subject = subject_of(model)
    if subject.kind == "encoder":
        return None
    with subject.isolated(subject.warmth) as isolated:
        matrix: list[list[float]] = measure(isolated, isolated.length(LEAK_LENGTH)).tolist()
    return matrix
