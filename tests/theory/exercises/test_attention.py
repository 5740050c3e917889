"""The solutions about attention against torch."""

import numpy as np
import torch
import torch.nn.functional as F

from glassformer.theory.exercises import attention as module

RNG = np.random.default_rng(7)


def tensors(*arrays):
    return [torch.from_numpy(array) for array in arrays]


def test_attention_is_torchs():
    q, k, v = RNG.normal(size=(5, 4)), RNG.normal(size=(7, 4)), RNG.normal(size=(7, 3))
    output, weights = module.attention(q, k, v)
    assert np.allclose(output, F.scaled_dot_product_attention(*tensors(q, k, v)).numpy(), atol=1e-12)
    assert np.allclose(weights.sum(-1), 1)


def test_causal_weights_are_torchs():
    scores = RNG.normal(size=(6, 6))
    expected = torch.from_numpy(scores).masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf).softmax(-1)
    assert np.allclose(module.causal_weights(scores), expected.numpy(), atol=1e-14)


def test_cross_attention_is_torchs_with_a_padding_mask():
    for case in module.CROSS.cases(RNG):
        x, memory, padding, w_q, w_k, w_v = tensors(*case.arguments.values())
        mask = ~padding.expand(len(x), -1)
        expected = F.scaled_dot_product_attention(x @ w_q, memory @ w_k, memory @ w_v, attn_mask=mask)
        assert np.allclose(module.cross_attention(**case.arguments), expected.numpy(), atol=1e-12)
