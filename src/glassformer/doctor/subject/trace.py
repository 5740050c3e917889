"""Record one call of a subject and read its attentions."""

from typing import Any

from torch import Tensor

from glassformer.anatomy.record import Graph, record
from glassformer.anatomy.trace import Trace, read_trace
from glassformer.doctor.subject.copies import n_bytes_of
from glassformer.doctor.subject.subject import Subject


def record_call(isolated: Subject, tokens: Tensor, exact: bool = False, **given: Any) -> tuple[Graph, Tensor]:
    """Run one call of an isolated subject; return its graph and its logits. Node 0 is the tokens, node 1 a source."""
    given = _complete(isolated, tokens, given)
    sources = [t for t in (tokens, given.get("source")) if t is not None]
    graph, (logits, _) = record(lambda: isolated.call(tokens, **given), sources, isolated.model, exact)
    return graph, logits


def _complete(isolated: Subject, tokens: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    if isolated.interface.is_seq2seq and given.get("source") is None:
        return {**given, "source": isolated.source(len(tokens))}
    return given


def trace_call(isolated: Subject, tokens: Tensor, **given: Any) -> Trace:
    """Run one call of an isolated subject and record it. The isolated subject is a copy: see `Subject.isolated`."""
    given = _complete(isolated, tokens, given)

    def compute() -> Trace:
        graph, logits = record_call(isolated, tokens, **given)
        trace = read_trace(graph, logits)
        graph.release()
        return trace

    return isolated.answer("trace", {"tokens": tokens, **given}, compute, _bytes)


def _bytes(trace: Trace) -> int:
    """At most: tensors that are views of one another are counted each."""
    found = [v for one in trace.attentions for v in vars(one).values()]
    found += [v for one in trace.linears for v in (one.input, one.output)]
    return sum(n_bytes_of(v) for v in [*found, trace.logits] if isinstance(v, Tensor))
