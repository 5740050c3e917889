"""One call of a subject is recorded with everything it passes to the model."""

import gc

import torch

from glassformer.anatomy.record import Node
from glassformer.doctor.subject.trace import trace_call
from tests.doctor.probes.subjects import gpt2, t5


def test_the_logits_are_those_of_the_call_and_a_source_is_drawn_where_one_is_needed():
    with t5().isolated() as isolated:
        tokens = isolated.tokens(2, 7)
        trace = trace_call(isolated, tokens)
        torch.testing.assert_close(trace.logits, isolated.logits(tokens))
        longer = trace_call(isolated, tokens, source=isolated.source(2, 13))
    assert {a.scores.shape[-1] for a in trace.attentions} == {7, 11}
    assert {a.scores.shape[-1] for a in longer.attentions} == {7, 13}


def test_a_step_with_a_cache_shows_one_query_and_every_key():
    with gpt2().isolated() as isolated:
        tokens = isolated.tokens(2, 7)
        _, cache = isolated.call(tokens[:, :6], cache=isolated.new_cache(), with_cache=True)
        trace = trace_call(isolated, tokens[:, 6:], cache=cache, with_cache=True)
    assert {tuple(a.scores.shape[-2:]) for a in trace.attentions} == {(1, 7)}


def nodes() -> int:
    return sum(type(o) is Node for o in gc.get_objects())


def test_a_trace_keeps_neither_the_recorded_graph_nor_the_weights():
    gc.collect()
    gc.disable()
    try:
        before = nodes()
        with gpt2().isolated(own=True) as isolated:
            trace = trace_call(isolated, isolated.tokens(2, 7))
        assert trace.attentions
        assert nodes() == before
    finally:
        gc.enable()
