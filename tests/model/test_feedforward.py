import math

import pytest
import torch

from glassformer import config as c
from glassformer.model.feedforward import ACTIVATIONS, build_dense
from glassformer.model.tap import NO_TAP


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("relu", 1.5),
        ("gelu", 0.75 * (1 + math.erf(1.5 / math.sqrt(2)))),
        ("gelu_tanh", 0.75 * (1 + math.tanh(math.sqrt(2 / math.pi) * (1.5 + 0.044715 * 1.5**3)))),
        ("silu", 1.5 / (1 + math.exp(-1.5))),
        ("relu2", 2.25),
        ("tanh", math.tanh(1.5)),
    ],
)
def test_activations_by_formula(name, value):
    assert float(ACTIVATIONS[name](torch.tensor(1.5, dtype=torch.float64))) == pytest.approx(value, abs=1e-12)
    if name.startswith("relu"):
        assert float(ACTIVATIONS[name](torch.tensor(-1.5))) == 0


def test_dense_and_gated_by_hand():
    x = torch.tensor([[2.0]])
    dense = build_dense(1, c.Dense(d_ff=1, activation="relu"))
    gated = build_dense(1, c.Gated(d_ff=1, activation="relu"))
    with torch.no_grad():
        for name, value in {"up.weight": 3.0, "up.bias": 1.0, "down.weight": 5.0, "down.bias": 7.0}.items():
            dense.get_parameter(name).fill_(value)
        for name, value in {"gate.weight": 3.0, "up.weight": -1.0, "down.weight": 5.0}.items():
            gated.get_parameter(name).fill_(value)
    assert dense(x, NO_TAP).item() == 5 * 7 + 7
    assert gated(x, NO_TAP).item() == 5 * (6 * -2)
