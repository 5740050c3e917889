"""Annotations vanish where jaxtyping is missing, and bite where it is there."""

import dataclasses

import pytest
import torch
from torch import Tensor

from glassformer.config import presets
from glassformer.model import build
from glassformer.model.positions import sinusoids
from glassformer.shapes import Float
from tests import annotations


def test_wrong_types_and_shapes_are_caught_in_the_tests():
    with pytest.raises(TypeError, match="positions"):
        sinusoids("three", 4, None)
    with pytest.raises(TypeError, match="has dtype float32"):
        sinusoids(torch.tensor([0.5]), 4, None)  # a float position where whole numbers are declared
    model = build(presets.nano(vocab_size=9, d_model=8, n_heads=2, d_ff=8, n_layers=1))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(TypeError, match="positions"):
        model(tokens, positions=torch.zeros(2, 4, dtype=torch.long))  # T is 3 in one argument and 4 in another
    with pytest.raises(TypeError, match="tokens"):
        model(tokens[0])
    with pytest.raises(TypeError, match="kind"):
        model.new_cache("ring")


def test_a_wrong_answer_is_caught_and_sizes_are_forgotten_between_calls():
    @annotations.checked
    def turned(x: Float[Tensor, "T D"]) -> Float[Tensor, "D T"]:
        return x if x.shape[0] == 3 else x.T

    assert turned(torch.ones(2, 5)).shape == (5, 2)
    assert turned(torch.ones(4, 2)).shape == (2, 4)
    with pytest.raises(TypeError, match="return"):
        turned(torch.ones(3, 2))


def test_fields_of_a_dataclass_are_checked():
    @annotations.checked
    @dataclasses.dataclass
    class Pair:
        keys: Float[Tensor, "B S"]
        values: Float[Tensor, "B S"]
        name: "str" = ""

    Pair(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(TypeError, match="values"):
        Pair(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(TypeError, match="name"):
        Pair(torch.ones(2, 3), torch.ones(2, 3), 5)
