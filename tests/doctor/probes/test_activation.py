"""The activation is found by fitting, and exact GELU is not tanh GELU."""

import pytest
import torch

from glassformer.anatomy.trace import Linear
from glassformer.doctor.probes import activation
from glassformer.finding import Verdict
from tests.doctor.probes.subjects import BUGS, bert, buggy, gpt2, rotary


def test_each_model_shows_its_own():
    assert set(activation.found_activations(gpt2()).values()) == {"gelu_tanh"}
    assert set(activation.found_activations(bert()).values()) == {"gelu"}
    assert all(activation.as_declared(make()).passed for make in (gpt2, bert, rotary))


@pytest.mark.parametrize("id", ["exact_gelu_one_layer", "relu_gate", "activation_missing"])
def test_another_one_is_found_with_its_layer(id):
    finding = activation.as_declared(buggy(id))
    assert finding.verdict is Verdict.FAIL
    assert BUGS[id].layer in (None, finding.evidence["layer"])


@pytest.mark.parametrize("name", [n for n in activation.ACTIVATION_FUNCTIONS if n != "identity"])
def test_every_function_is_told_from_the_others(name):
    torch.manual_seed(0)
    u, gate = 2 * torch.randn(40, 32), torch.randn(40, 32)
    first, second = Linear(0, u, u, ""), Linear(1, gate, gate, "")
    f = activation.ACTIVATION_FUNCTIONS[name]
    assert activation.between([first], Linear(2, f(u), u, "")) == name
    assert activation.between([first, second], Linear(2, f(u) * gate, u, "")) == name
    fused = Linear(0, u, torch.cat([u, gate], dim=-1), "")
    assert activation.between([fused], Linear(2, f(u) * gate, u, "")) == name


def test_a_function_of_no_known_name_is_still_seen():
    torch.manual_seed(0)
    u, other = 2 * torch.randn(40, 32), torch.randn(40, 32)
    first = Linear(0, u, u, "")
    steep = torch.nn.functional.leaky_relu(u, 0.1)
    assert activation.between([first], Linear(2, steep, u, "")) == activation.OTHER
    assert activation.between([first], Linear(2, other, u, "")) is None
