"""The cache of a captured step holds what the cache of the prompt held, at addresses that stay."""

import pytest
import torch

from glassformer.kernels.cuda.graph.cache import CapturedCache
from tests.variants import decoder, lively


@pytest.mark.parametrize("kind", ["static", "growing"])
@torch.no_grad()
def test_a_step_over_it_is_a_step_over_the_cache_it_took(kind):
    model = lively(decoder(), std=0.4)[0].float()
    tokens, real = torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([[False, True, True], [True, True, True]])
    cache = model.new_cache(kind, capacity=8)
    model(tokens, real, cache=cache)
    made = CapturedCache(cache, 8, 2)
    assert made.start.tolist() == [1, 0]
    assert made.positions_now().tolist() == [[2], [3]]
    addresses = [layer.k.data_ptr() for layer in made.layers]
    new = torch.tensor([[8], [9]])
    found = model(new, cache=made)
    torch.testing.assert_close(found, model(new, cache=cache))
    made.reorder(torch.tensor([1, 1]))
    assert made.start.tolist() == [0, 0]
    assert addresses == [layer.k.data_ptr() for layer in made.layers]
    torch.testing.assert_close(made.layers[0].k[0], made.layers[0].k[1])


@torch.no_grad()
def test_a_static_cache_of_the_same_size_is_not_copied():
    model = lively(decoder(), std=0.4)[0].float()
    cache = model.new_cache("static", capacity=8)
    model(torch.tensor([[1, 2]]), cache=cache)
    assert CapturedCache(cache, 8, 1).layers[0].k is cache.layers[0].k
    assert CapturedCache(cache, 16, 1).layers[0].k is not cache.layers[0].k
