"""Which engine is taken: auto never compiles and never fails; what was asked for and cannot be is a sentence."""

import pytest
import torch

from glassformer.config import presets
from glassformer.generation import generate
from glassformer.kernels.cpu.decode import choice, library
from glassformer.model import build
from tests.variants import seq2seq

NANO = presets.nano(max_len=32)


def test_auto_is_native_only_where_the_kernels_are_built_and_nobody_said_no(monkeypatch):
    model = build(NANO)
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    monkeypatch.setattr(library, "is_built", lambda: True)
    assert choice.choose_engine(model, "static", "auto", "float32") == "native"
    assert choice.choose_engine(model, None, "auto", "float32") == "torch"
    assert choice.choose_engine(model.double(), "static", "auto", "float32") == "torch"
    assert choice.choose_engine(build(presets.moe_tiny()), "static", "auto", "float32") == "torch"
    assert choice.choose_engine(build(seq2seq()), "static", "auto", "float32") == "torch"
    monkeypatch.setenv("GLASSFORMER_NATIVE", "0")
    assert choice.choose_engine(build(NANO), "static", "auto", "float32") == "torch"
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    monkeypatch.setattr(library, "is_built", lambda: False)
    assert choice.choose_engine(build(NANO), "static", "auto", "float32") == "torch"


REFUSED = {
    "an unknown engine": ({"engine": "numba"}, "'auto', 'torch' or 'native'"),
    "an unknown precision": ({"precision": "int3"}, "'float32', 'bfloat16', 'int8'"),
    "torch with int8": ({"engine": "torch", "precision": "int8"}, "needs the compiled kernels"),
    "no cache": ({"engine": "native", "cache": False}, "a cache of their own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_a_sentence(case):
    settings, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        generate(build(NANO), [[1, 2]], 3, **settings)


def test_an_architecture_without_kernels_is_a_sentence():
    with pytest.raises(ValueError, match="mixture of experts"):
        generate(build(presets.moe_tiny()), [[1, 2]], 3, engine="native")
    with pytest.raises(ValueError, match="float64"):
        generate(build(NANO, dtype=torch.float64), [[1, 2]], 3, engine="native")
