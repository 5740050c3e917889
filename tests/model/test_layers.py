import math

import pytest
import torch

from glassformer import config as c
from glassformer.model.context import NO_TAP
from glassformer.model.layers import (
    ACTIVATIONS,
    LayerNorm,
    MoE,
    RMSNorm,
    balance_loss,
    build_dense,
    build_norm,
    top_experts,
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


def mixture(n_active: int, normalize: bool = True) -> MoE:
    torch.manual_seed(1)
    moe = MoE(7, c.MoE(n_experts=5, n_active=n_active, expert=c.Gated(d_ff=11), normalize=normalize)).double()
    for p in moe.parameters():
        torch.nn.init.normal_(p, 0, 0.5)
    return moe


def test_all_experts_active_is_the_dense_mixture():
    moe, x = mixture(n_active=5), torch.randn(2, 3, 7, dtype=torch.float64)
    gates = moe.router(x).softmax(-1)
    expected = sum(gates[..., e, None] * expert(x, NO_TAP) for e, expert in enumerate(moe.experts))
    assert (moe(x, NO_TAP) - expected).abs().max() < 1e-13


def test_one_token_at_a_time_gives_the_same():
    moe, x = mixture(n_active=2), torch.randn(2, 3, 7, dtype=torch.float64)
    alone = torch.stack([torch.stack([moe(token[None, None], NO_TAP)[0, 0] for token in row]) for row in x])
    assert (moe(x, NO_TAP) - alone).abs().max() < 1e-13


def test_unnormalised_gates_are_smaller_by_their_sum():
    x = torch.randn(1, 4, 7, dtype=torch.float64)
    total = top_experts(mixture(2).router(x).softmax(-1), 2)[0].sum(-1, keepdim=True)
    assert (mixture(2)(x, NO_TAP) * total - mixture(2, normalize=False)(x, NO_TAP)).abs().max() < 1e-13


def test_ties_go_to_the_lowest_index():
    _, choice = top_experts(torch.full((1, 4), 0.25), 2)
    assert choice.tolist() == [[0, 1]]


def test_balance_loss_is_one_when_even_and_e_when_one_takes_all():
    even, choice = torch.full((8, 4), 0.25), torch.arange(8)[:, None] % 4
    assert float(balance_loss(even, choice)) == 1.0
    greedy = torch.zeros(8, 4)
    greedy[:, 2] = 1
    assert float(balance_loss(greedy, torch.full((8, 1), 2))) == 4.0


def test_balance_loss_pushes_the_crowded_expert_down():
    probabilities = torch.tensor([[0.7, 0.1, 0.2]]).repeat(6, 1).requires_grad_()
    balance_loss(probabilities, top_experts(probabilities, 1)[1]).backward()
    assert (probabilities.grad[:, 0] > probabilities.grad[:, 1]).all()
