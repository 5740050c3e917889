import torch

from glassformer import config as c
from glassformer.model.context import NO_TAP
from glassformer.model.moe import MoE, balance_loss, top_experts


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
