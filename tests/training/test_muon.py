import pytest
import torch

from glassformer.training.muon import orthogonalize


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
