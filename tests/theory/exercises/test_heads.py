"""The solutions about heads against torch and against generating without a cache."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from glassformer.theory.exercises import heads as module

RNG = np.random.default_rng(7)


def tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays]


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_multi_head_is_torchs_module(heads):
    T, D = 5, 8
    x = RNG.normal(size=(T, D))
    w = [RNG.normal(size=(D, D)) for _ in range(4)]
    layer = torch.nn.MultiheadAttention(D, heads, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([m.T for m in tensors(*w[:3])]))
        layer.out_proj.weight.copy_(torch.from_numpy(w[3]).T)
        expected = layer(*[torch.from_numpy(x)[None]] * 3, need_weights=False)[0][0]
    assert np.allclose(module.multi_head(x, *w, heads), expected.numpy(), atol=1e-12)


def test_cached_steps_are_causal_attention():
    T, D, K, U = 6, 5, 4, 3
    x, w_q, w_k, w_v = (RNG.normal(size=s) for s in ((T, D), (D, K), (D, K), (D, U)))
    expected = F.scaled_dot_product_attention(*tensors(x @ w_q, x @ w_k, x @ w_v), is_causal=True).numpy()
    keys, values = np.zeros((0, K)), np.zeros((0, U))
    for t in range(T):
        y, keys, values = module.cache_step(x[t], keys, values, w_q, w_k, w_v)
        assert np.allclose(y, expected[t], atol=1e-12)
    assert np.allclose(keys, x @ w_k)
    assert np.allclose(values, x @ w_v)
