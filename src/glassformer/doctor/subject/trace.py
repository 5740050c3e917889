"""Record one call of a subject and read its attentions."""

from typing import Any

from torch import Tensor

from glassformer.anatomy.record import record
from glassformer.anatomy.trace import Trace, read_trace
from glassformer.doctor.subject.subject import Subject


def trace_call(isolated: Subject, tokens: Tensor, **given: Any) -> Trace:
    """Run one call of an isolated subject and record it. The isolated subject is a copy: see `Subject.isolated`."""
    if isolated.interface.is_seq2seq and given.get("source") is None:
        given["source"] = isolated.source(len(tokens))
    sources = [t for t in (tokens, given.get("source")) if t is not None]
    graph, (logits, _) = record(lambda: isolated.call(tokens, **given), sources, isolated.model, exact=False)
    return read_trace(graph, logits)
