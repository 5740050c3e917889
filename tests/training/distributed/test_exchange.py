"""Exchanges between ranks and their gradients, against the same function of one process."""

import pytest
import torch

from glassformer.training.distributed.exchange import bounds
from tests.training.distributed.threads import Threads, on_ranks


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("length", "size"), [(7, 3), (2, 4), (8, 2), (5, 1)])
def test_parts_differ_by_one_and_cover_everything(length, size):
    ranges = [bounds(length, rank, size) for rank in range(size)]
    assert [i for first, last in ranges for i in range(first, last)] == list(range(length))
    sizes = [last - first for first, last in ranges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize("size", [2, 3])
def test_positions_are_divided_around_a_sum_as_in_tensor_parallelism(length, size):
    """part, gather, a divided matmul, scatter, join: values and gradients of the undivided computation."""
    x, w, v = draw(2, length, 6), draw(6 * size, 6, seed=1), draw(2, length, 6, seed=2)

    def whole(x, w):
        return (x.tanh() @ w.T).relu() @ w

    x1, w1 = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = whole(x1, w1)
    (expected * v).sum().backward()

    def divided(ranks: Threads):
        x2, w2 = x.clone().requires_grad_(), w[slice(*ranks.bounds(len(w)))].clone().requires_grad_()
        inner = ranks.gather(ranks.part(x2, 1).tanh(), 1, length)
        out = ranks.join(ranks.scatter((inner @ w2.T).relu() @ w2, 1), 1, length)
        (out * v).sum().backward()
        return out.detach(), x2.grad, w2.grad

    found = on_ranks(size, divided)
    for out, x_gradient, _ in found:
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(x_gradient, x1.grad)
    torch.testing.assert_close(torch.cat([w_gradient for *_, w_gradient in found]), w1.grad)


def test_a_copied_input_gets_the_gradients_of_all_ranks_and_a_sum_passes_its_own_on():
    x, w = draw(3, 4), draw(4, 4, seed=1)
    x1 = x.clone().requires_grad_()
    (x1 @ w).square().sum().backward()

    def divided(ranks: Threads):
        x2 = x.clone().requires_grad_()
        columns = slice(*ranks.bounds(4))
        out = ranks.add(ranks.copy(x2)[:, columns] @ w[columns])
        out.square().sum().backward()
        return x2.grad

    for gradient in on_ranks(2, divided):
        torch.testing.assert_close(gradient, x1.grad)
