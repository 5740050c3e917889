"""The backward passes against torch's automatic differentiation."""

import numpy as np
import torch
import torch.nn.functional as F

from glassformer.theory.exercises import backward as module

RNG = np.random.default_rng(5)


def leaves(*arrays):
    return [torch.from_numpy(array).requires_grad_() for array in arrays]


def test_loss_and_gradient_are_torchs():
    for case in module.LOSS.cases(RNG):
        logits, targets, ignored = case.arguments.values()
        [z] = leaves(logits)
        expected = F.cross_entropy(z, torch.from_numpy(targets), ignore_index=ignored)
        expected.backward()
        loss, d_logits = module.cross_entropy(logits, targets, ignored)
        assert np.isclose(loss, expected.item(), atol=1e-12)
        assert np.allclose(d_logits, z.grad.numpy(), atol=1e-12)


def test_the_gradient_of_attention_is_torchs():
    for case in module.ATTENTION.cases(RNG):
        *inputs, d_out = case.arguments.values()
        tensors = leaves(*inputs)
        F.scaled_dot_product_attention(*tensors, is_causal=True).backward(torch.from_numpy(d_out))
        for found, tensor in zip(module.attention_backward(*inputs, d_out), tensors, strict=True):
            assert np.allclose(found, tensor.grad.numpy(), atol=1e-12)


def test_the_gradient_of_layer_norm_is_torchs():
    for case in module.NORM.cases(RNG):
        x, gain, eps, d_y = case.arguments.values()
        tensors = leaves(x, gain, np.zeros(len(gain)))
        F.layer_norm(tensors[0], gain.shape, *tensors[1:], eps).backward(torch.from_numpy(d_y))
        for found, tensor in zip(module.norm_backward(x, gain, eps, d_y), tensors, strict=True):
            assert np.allclose(found, tensor.grad.numpy(), atol=1e-12)
