"""CTranslate2 through its converter runs the same model."""

import pytest

pytest.importorskip("ctranslate2", reason="a peer that is not installed here")

import glassformer as gf
from glassformer.bench.peers import ctranslate
from tests.bench import tiny


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_its_tokens_are_those_of_the_engine(subject, precision):
    order = tiny.order(subject, "ctranslate2", "ctranslate", precision)
    ctranslate.prepare(order)
    ctranslate.prepare(order)  # already there
    marks = []
    made = ctranslate.Peer(order).generate(order.prompts, order.new, lambda: marks.append(1))
    assert len(marks) == order.new
    assert [len(row) for row in made] == [order.new] * 2
    if precision == "float32":
        assert made == tiny.engine_ids(subject, order)


def test_its_beam_search_is_ours(subject):
    order = tiny.order(subject, "ctranslate2", "ctranslate", rows=1)
    ctranslate.prepare(order)
    found = ctranslate.Peer(order).generate(order.prompts, order.new, tiny.nothing, beams=3)
    assert found == gf.generate(gf.load(subject.root / "hf"), order.prompts, order.new, beams=3, stop=[]).new
