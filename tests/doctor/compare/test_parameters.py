"""Weights of the same names compared with each other."""

import torch
from torch import nn

from glassformer.doctor.compare.parameters import parameter_gaps


def linear(change=None):
    torch.manual_seed(0)
    model = nn.Linear(5, 5)
    if change is not None:
        with torch.no_grad():
            change(model)
    return model


def how(change):
    gaps = parameter_gaps(linear(), linear(change), torch.float32)
    assert [g.name for g in gaps] == ["weight"]
    return gaps[0].text


def test_what_happened_to_a_weight_is_reported():
    assert how(lambda m: m.weight.copy_(m.weight.T.clone())) == "transposed"
    assert how(lambda m: m.weight.copy_(m.weight.flip(0).clone())) == "the same rows in another order"
    assert how(lambda m: m.weight.copy_(m.weight.flip(1).clone())) == "the same numbers at other indices"
    assert how(lambda m: m.weight[0, 0].add_(1)) == "other numbers at 1 of 25 entries"


def test_equal_weights_other_names_and_rounding():
    assert parameter_gaps(linear(), linear(), torch.float32) == []
    assert parameter_gaps(linear(), nn.Sequential(linear()), torch.float32) is None
    assert parameter_gaps(linear(), None, torch.float32) is None
    assert parameter_gaps(linear(), linear().bfloat16(), torch.bfloat16) == []
    assert parameter_gaps(linear(), linear().bfloat16(), torch.float32) != []


def test_shapes():
    gaps = parameter_gaps(nn.Linear(3, 5), nn.Linear(5, 3), torch.float32)
    assert gaps[0].text == "of shape (5, 3) in A and (3, 5) in B"
