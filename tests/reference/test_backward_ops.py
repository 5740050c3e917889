"""Each small gradient against torch's autograd of the same operation."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from glassformer import config as gf
from glassformer.reference import backward_ops as back
from glassformer.reference.ops import softmax

CLOSE = {"rtol": 1e-11, "atol": 1e-13}  # float64 on both sides, a handful of roundings


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def autograd(function: Callable[..., torch.Tensor], d_y: np.ndarray, *inputs: np.ndarray) -> list[np.ndarray]:
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    function(*tensors).backward(torch.tensor(d_y))
    return [t.grad.numpy() for t in tensors if t.grad is not None]


def test_cross_entropy_and_its_gradient_equal_torch() -> None:
    logits, targets = values(2, 3, 5), np.array([[0, -100, 4], [2, 2, -100]])
    tensor = torch.tensor(logits, requires_grad=True)
    theirs = torch.nn.functional.cross_entropy(tensor.reshape(-1, 5), torch.tensor(targets).reshape(-1))
    theirs.backward()
    assert tensor.grad is not None
    assert back.cross_entropy(logits, targets) == pytest.approx(theirs.item(), rel=1e-14)
    d_logits = back.cross_entropy_backward(logits, targets)
    np.testing.assert_allclose(d_logits, tensor.grad.numpy(), **CLOSE)
    np.testing.assert_allclose(d_logits.sum(axis=-1), 0, atol=1e-16)
    assert (d_logits[targets == -100] == 0).all()


def test_linear_gradient_equals_autograd() -> None:
    x, weight, bias, d_y = values(2, 3, 5), values(7, 5), values(7), values(2, 3, 7, seed=1)
    d_x, found = back.linear_backward({"l.weight": weight, "l.bias": bias}, "l", x, d_y)
    expected = autograd(torch.nn.functional.linear, d_y, x, weight, bias)
    for ours, theirs in zip((d_x, found["l.weight"], found["l.bias"]), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    assert set(back.linear_backward({"l.weight": weight}, "l", x, d_y)[1]) == {"l.weight"}


def test_softmax_gradient_equals_autograd_and_ignores_a_shift() -> None:
    scores, d_p = values(2, 5), values(2, 5, seed=1)
    d_scores = back.softmax_backward(softmax(scores), d_p)
    np.testing.assert_allclose(d_scores, autograd(lambda s: s.softmax(-1), d_p, scores)[0], **CLOSE)
    np.testing.assert_allclose(d_scores.sum(axis=-1), 0, atol=1e-15)


def test_norm_gradients_equal_autograd() -> None:
    x, weight, bias, d_y = values(2, 3, 7), values(7, seed=1), values(7, seed=2), values(2, 3, 7, seed=3)
    d_x, found = back.normalize_backward(gf.LayerNorm(0.1), {"n.weight": weight, "n.bias": bias}, "n", x, d_y)
    expected = autograd(lambda x, w, b: torch.nn.functional.layer_norm(x, (7,), w, b, 0.1), d_y, x, weight, bias)
    for ours, theirs in zip((d_x, found["n.weight"], found["n.bias"]), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)
    d_x, found = back.normalize_backward(gf.RMSNorm(0.1), {"n.weight": weight}, "n", x, d_y)
    expected = autograd(lambda x, w: torch.nn.functional.rms_norm(x, (7,), w, 0.1), d_y, x, weight)
    for ours, theirs in zip((d_x, found["n.weight"]), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_derivatives_equal_autograd(name: gf.Activation) -> None:
    x = np.concatenate([np.linspace(-6, 6, 25), [0.0, 40.0, -40.0]])
    expected = autograd(ACTIVATIONS[name], np.ones_like(x), x)[0]
    np.testing.assert_allclose(back.activation_derivative(name, x), expected, rtol=1e-10, atol=1e-13)


def test_a_row_read_twice_gets_both_gradients() -> None:
    d_table = back.lookup_backward((4, 2), np.array([[1, 1, 3]]), np.array([[[1.0, 2.0], [10.0, 20.0], [5.0, 5.0]]]))
    np.testing.assert_array_equal(d_table, [[0, 0], [11, 22], [0, 0], [5, 5]])
