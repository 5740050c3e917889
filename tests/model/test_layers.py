import math

import pytest
import torch

from glassformer import config as c
from glassformer.model.context import NO_TAP
from glassformer.model.layers import (
    ACTIVATIONS,
    LayerNorm,
    RMSNorm,
    build_dense,
    build_norm,
)


def test_layer_norm_by_hand():
    """Row (1, 3): mean 2, biased variance 1; eps 3 makes the root 2."""
    norm = LayerNorm(2, c.LayerNorm(eps=3.0))
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, 4.0]))
        norm.bias.copy_(torch.tensor([10.0, 20.0]))
    assert norm(torch.tensor([[1.0, 3.0]])).tolist() == [[9.0, 22.0]]


def test_rms_norm_by_hand():
    """Row (1, 7): mean square 25; eps 11 makes the root 6."""
    norm = RMSNorm(2, c.RMSNorm(eps=11.0))
    torch.nn.init.constant_(norm.weight, 12.0)
    assert norm(torch.tensor([[1.0, 7.0]])).tolist()[0] == pytest.approx([2.0, 14.0])


def test_norm_without_bias_has_no_bias():
    assert set(dict(build_norm(5, c.LayerNorm(bias=False)).named_parameters())) == {"weight"}
    assert set(dict(build_norm(5, c.RMSNorm()).named_parameters())) == {"weight"}


@pytest.mark.parametrize("spec", [c.LayerNorm(), c.RMSNorm()])
def test_each_token_is_normalised_by_itself(spec):
    norm = build_norm(7, spec)
    torch.nn.init.normal_(norm.weight)
    if isinstance(norm, LayerNorm):
        torch.nn.init.normal_(norm.bias)
    x = torch.randn(2, 3, 7)
    changed = x.clone()
    changed[0, 1] += 1
    same = torch.ones(2, 3, dtype=torch.bool)
    same[0, 1] = False
    assert torch.equal(norm(x)[same], norm(changed)[same])
    assert not torch.equal(norm(x)[0, 1], norm(changed)[0, 1]) or isinstance(spec, c.LayerNorm)


@pytest.mark.parametrize("spec", [c.LayerNorm(), c.RMSNorm()])
def test_bf16_statistics_are_taken_in_float32(spec):
    """A row of 4096 equal entries 3: a bf16 sum would stop growing at 256 terms and give a wrong mean."""
    norm = build_norm(4096, spec).bfloat16()
    torch.nn.init.ones_(norm.weight)
    if isinstance(norm, LayerNorm):
        torch.nn.init.zeros_(norm.bias)
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    x[0, ::2] = 1.0
    exact = build_norm(4096, spec).double()
    exact.load_state_dict({k: v.double() for k, v in norm.state_dict().items()})
    assert (norm(x).double() - exact(x.double())).abs().max() < 2**-7


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
