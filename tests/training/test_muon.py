import pytest
import torch

from glassformer.training.muon import Muon, orthogonalize


@pytest.mark.parametrize("shape", [(3, 40, 10), (3, 10, 40), (1, 24, 12)])
def test_singular_values_come_near_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(x).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_singular_directions_stay():
    """The result is U f(S) V^T: it commutes with the rotation to the singular basis of its input."""
    x = torch.randn(1, 30, 12, generator=torch.Generator().manual_seed(0))
    u, _, vt = torch.linalg.svd(x[0], full_matrices=False)
    inner = u.T @ orthogonalize(x)[0].float() @ vt.T
    assert (inner - inner.diag().diag()).abs().max() < 0.03  # bf16


def test_a_stack_is_its_members():
    x = torch.randn(4, 16, 24, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([orthogonalize(x[i : i + 1]) for i in range(4)])
    assert (orthogonalize(x).float() - alone.float()).abs().max() < 0.02


def test_a_zero_gradient_gives_a_zero_update():
    assert orthogonalize(torch.zeros(1, 4, 6)).abs().max() == 0


def given_gradients(seed: int, scale: float = 1.0) -> Muon:
    """An optimizer of three matrices of two shapes that has done a step, with its next gradients times `scale`."""
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((8, 16), (8, 16), (16, 8))]
    optimizer = Muon(matrices, torch.tensor(0.3), momentum=0.9, weight_decay=0.2)
    for number, times in ((0, 1.0), (seed, scale)):
        if number:
            optimizer.step()
        for p in matrices:
            p.grad = times * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
    return optimizer


def state(optimizer):
    matrices = optimizer.param_groups[0]["params"]
    return [t.detach().clone() for p in matrices for t in (p, optimizer.state[p]["momentum_buffer"])]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_step_that_failed_changes_nothing(poison):
    optimizer = given_gradients(1)
    before = state(optimizer)
    optimizer.param_groups[0]["params"][0].grad[3, 5] = poison
    optimizer.step(torch.tensor(1.0), torch.tensor(poison))
    assert all(map(torch.equal, state(optimizer), before))


def test_gradients_are_shrunk():
    plain, shrunk = given_gradients(1), given_gradients(1, 8.0)
    plain.step()
    shrunk.step(torch.tensor(0.0), torch.tensor(1 / 8))
    assert all(map(torch.equal, state(plain), state(shrunk)))
