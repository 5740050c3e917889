"""Doctor: a model of the shelf examined, and what it has."""

from typing import TYPE_CHECKING, Any

from glassformer.studio import schema
from glassformer.studio.events import Emit
from glassformer.studio.jobs import Ticket
from glassformer.studio.shelf import Shelf

if TYPE_CHECKING:
    from glassformer.finding import Finding

LEAK_LENGTH = 12


def examine(shelf: Shelf, asked: schema.Doctor, ticket: Ticket, emit: Emit) -> None:
    """Events `progress` and `finding` while probes run, then each `diagnosis`, and `done` with the leak matrix.

    The patient is a copy of its own: a large model is changed and restored by some probes, and others may be using it.
    """
    from glassformer.doctor import diagnose
    from glassformer.theory.claims.claim import plain

    loaded = shelf.fresh(asked.model)

    def tell(what: str, done: int, of: int) -> None:
        emit("progress", {"what": what, "done": done, "of": of})

    def found(finding: "Finding", family: str) -> None:
        emit("finding", {**plain(finding.to_dict()), "family": family})

    report = diagnose(loaded.model, quick=asked.quick, tell=tell, found=found, name=loaded.name)
    for diagnosis in report.diagnoses:
        emit("diagnosis", {**plain(diagnosis.to_dict()), "place": diagnosis.where(), "text": diagnosis.text()})
    leak = report.pictures.get("leak") or leak_matrix(loaded.model)
    facts = {"healthy": report.healthy, "notes": list(report.notes), "seconds": report.seconds, "text": report.text()}
    emit("done", {**facts, "leak": plain(leak)})


def leak_matrix(model: Any) -> list[list[float]] | None:
    """How far output i moves when input j alone changes; None for a model that reads in both directions."""
    from glassformer.doctor.probes.causality import leak_matrix as measure
    from glassformer.doctor.subject.adapt import subject_of

    subject = subject_of(model)
    if subject.kind == "encoder":
        return None
    with subject.patient(subject.warmth) as patient:
        matrix: list[list[float]] = measure(patient, patient.length(LEAK_LENGTH)).tolist()
    return matrix
