"""A replaced module keeps its parameters and their names."""

import torch
from torch import nn

from glassformer.kernels.replacement import Replacement, replace_modules


class Doubled(nn.Linear):
    factor: float = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


def test_a_module_gets_the_class_and_the_attributes():
    layer, x = nn.Linear(3, 2), torch.ones(1, 3)
    wanted, names, parameters = layer(x), list(layer.state_dict()), list(layer.parameters())
    assert replace_modules([Replacement(layer, Doubled, {"factor": 2.0})])
    assert torch.equal(layer(x), 2 * wanted)
    assert list(layer.state_dict()) == names
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    assert not replace_modules([])
