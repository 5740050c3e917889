"""Record one call of a subject and read its attentions."""

from typing import Any

from torch import Tensor

from glassformer.anatomy.record import Graph, record
from glassformer.anatomy.trace import Trace, read_trace
from glassformer.doctor.subject.copies import n_bytes_of
from glassformer.doctor.subject.subject import Subject


def record_call(isolated: Subject, tokens: Tensor, exact: bool = False, **given: Any) -> tuple[Graph, Tensor]:
    """Run one call of an isolated subject; return its graph and its logits. Node 0 is the tokens, node 1 a source."""
    if isolated.interface.is_seq2seq and given.get("source") is None:
        given["source"] = isolated.source(len(tokens))
    sources = [t for t in (tokens, given.get("source")) if t is not None]

    def compute() -> tuple[Graph, Tensor]:
        graph, (logits, _) = record(lambda: isolated.call(tokens, **given), sources, isolated.model, exact)
        return graph, logits

    return isolated.answer(("graph", exact), {"tokens": tokens, **given}, compute, lambda found: _bytes(found[0]))


def _bytes(graph: Graph) -> int:
    return sum(n_bytes_of(n.value) for n in graph.nodes if n.live)


def trace_call(isolated: Subject, tokens: Tensor, **given: Any) -> Trace:
    """Run one call of an isolated subject and record it. The isolated subject is a copy: see `Subject.isolated`."""
    return read_trace(*record_call(isolated, tokens, **given))
