"""Record one call of a subject and read its attentions."""

from typing import Any

from torch import Tensor

from glassformer.anatomy.record import record
from glassformer.anatomy.trace import Trace, read_trace
from glassformer.doctor.subject.subject import Subject


def trace_call(patient: Subject, tokens: Tensor, **given: Any) -> Trace:
    """Run one call of a patient and record it. The patient is a copy: see `Subject.patient`."""
    if patient.interface.is_seq2seq and given.get("source") is None:
        given["source"] = patient.source(len(tokens))
    sources = [t for t in (tokens, given.get("source")) if t is not None]
    graph, (logits, _) = record(lambda: patient.call(tokens, **given), sources, patient.model, exact=False)
    return read_trace(graph, logits)
