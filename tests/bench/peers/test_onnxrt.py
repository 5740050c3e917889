"""ONNX Runtime on our graph runs the same model."""

import pytest

pytest.importorskip("onnxruntime", reason="a peer that is not installed here")
pytest.importorskip("onnx", reason="a peer that is not installed here")

from glassformer.bench.peers import onnxrt
from tests.bench import tiny


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_its_tokens_are_those_of_the_engine(subject, precision):
    order = tiny.order(subject, "onnxruntime", "onnxrt", precision)
    onnxrt.prepare(order)
    onnxrt.prepare(order)  # already there
    marks = []
    made = onnxrt.Peer(order).generate(order.prompts, order.new, lambda: marks.append(1))
    assert len(marks) == order.new
    if precision == "float32":
        assert made == tiny.engine_ids(subject, order)
    else:
        assert [row[0] for row in made] == [row[0] for row in tiny.engine_ids(subject, order)]
