"""llama.cpp on our GGUF file runs the same model."""

import pytest

pytest.importorskip("llama_cpp", reason="a peer that is not installed here")
pytest.importorskip("gguf", reason="a peer that is not installed here")

from glassformer.bench.peers import llama
from tests.bench import tiny


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_its_tokens_are_those_of_the_engine(subject, precision):
    order = tiny.order(subject, "llama.cpp", "llama", precision)
    llama.prepare(order)
    peer = llama.Peer(order)
    marks = []
    made = peer.generate(order.prompts, order.new, lambda: marks.append(1))
    assert len(marks) == order.new
    assert made == peer.generate(order.prompts, order.new, tiny.nothing)  # the cache was emptied between
    if precision == "float32":
        assert made == tiny.engine_ids(subject, order)


def test_it_draws_as_glass_sample_does(subject):
    order = tiny.order(subject, "llama.cpp", "llama", new=40)
    llama.prepare(order)
    peer = llama.Peer(order)
    tiny.check_draws(subject, order, peer.generate(order.prompts, order.new, tiny.nothing, sampled=True))
    assert peer.generate(order.prompts, order.new, tiny.nothing) == tiny.engine_ids(subject, order)
