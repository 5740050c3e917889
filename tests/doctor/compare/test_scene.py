"""An explanation has to explain; numbers that are something are called so."""

import torch

from glassformer.doctor.compare.scene import column_order, named
from tests.doctor.compare.pairs import ours
from tests.doctor.compare.scenes import scene


def test_a_residual_must_be_small_compared_with_the_difference():
    made = scene(ours("gpt2"), ours("gpt2"), "logits")
    made.difference = 1.0
    assert made.explains(1e-9)
    assert not made.explains(1e-5)
    made.difference = 1e-7
    assert not made.explains(5e-9)
    assert made.explains(1e-10)
    made.exact, made.difference = False, 1e-2
    assert made.explains(1e-5)
    assert not made.explains(5e-3)


def test_numbers_with_a_name():
    made = scene(ours("gpt2"), ours("gpt2"), "logits")
    attention = made.parts[0].blocks[0].attention
    assert named(24**0.5, made) == "4.89898 = √D"
    assert named(8**-0.5, made, attention) == "0.353553 = 1/√K"
    assert named(0.37, made, attention) == "0.37"


def test_columns_are_found_again_only_if_all_are_there_once():
    p = torch.randn(9, 5, dtype=torch.float64)
    assert column_order(p, p[:, [4, 0, 2, 1, 3]]) == [4, 0, 2, 1, 3]
    assert column_order(p, p[:, [0, 0, 1, 2, 3]]) is None
    assert column_order(p, p + 1e-3) is None
