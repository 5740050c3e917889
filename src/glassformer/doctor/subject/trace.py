"""Record one call of a subject and read its attentions."""

from typing import Any

from torch import Tensor

from glassformer.anatomy.record import Graph, record
from glassformer.anatomy.trace import Trace, read_trace
from glassformer.doctor.subject.subject import Subject


def record_call(isolated: Subject, tokens: Tensor, exact: bool = False, **given: Any) -> tuple[Graph, Tensor]:
    """Run one call of an isolated subject; return its graph and its logits. Node 0 is the tokens, node 1 a source."""
    if isolated.interface.is_seq2seq and given.get("source") is None:
        given["source"] = isolated.source(len(tokens))
    sources = [t for t in (tokens, given.get("source")) if t is not None]
    graph, (logits, _) = record(lambda: isolated.call(tokens, **given), sources, isolated.model, exact)
    return graph, logits


def trace_call(isolated: Subject, tokens: Tensor, **given: Any) -> Trace:
    """Run one call of an isolated subject and record it. The isolated subject is a copy: see `Subject.isolated`."""
    return read_trace(*record_call(isolated, tokens, **given))
