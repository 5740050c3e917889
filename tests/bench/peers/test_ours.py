"""Our contenders say what the engine says, and tell of every token."""

import pytest

from glassformer.bench.peers import ours
from glassformer.kernels.toolchain import cxx
from tests.bench import tiny


def test_the_plain_engine(subject):
    order = tiny.order(subject, "glassformer-torch", "ours")
    marks = []
    assert ours.Peer(order).generate(order.prompts, order.new, lambda: marks.append(1)) == tiny.engine_ids(
        subject, order
    )
    assert len(marks) == order.new


@pytest.mark.skipif(cxx.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
def test_the_kernels_in_every_precision(subject, precision):
    order = tiny.order(subject, "glassformer", "ours", precision)
    made = ours.Peer(order).generate(order.prompts, order.new, tiny.nothing)
    assert [len(row) for row in made] == [order.new, order.new]
    if precision == "float32":
        assert made == tiny.engine_ids(subject, order)


def test_bfloat16_of_the_engine_is_in_its_weights(subject):
    peer = ours.Peer(tiny.order(subject, "glassformer-torch", "ours", "bfloat16"))
    assert str(next(peer.model.parameters()).dtype) == "torch.bfloat16"
