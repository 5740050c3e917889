"""One call of a subject is recorded with everything it passes to the model."""

import torch

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
