"""The small operations: values worked out by hand, and torch's own in float64."""

import numpy as np
import pytest
import torch
from transformers.activations import ACT2FN

from glassformer import config as gf
from glassformer.reference.ops import activate, layer_norm, linear, log_softmax, normalize, rms_norm, softmax

EXACT = {"rtol": 1e-14, "atol": 1e-15}  # one or two roundings of float64


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def test_linear_is_x_times_w_transposed_plus_b() -> None:
    weights = {"q.weight": np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "q.bias": np.array([0.5, 0.0, -1.0])}
    np.testing.assert_array_equal(linear(weights, "q", np.array([1.0, 10.0])), [21.5, 43.0, 64.0])
    del weights["q.bias"]
    np.testing.assert_array_equal(linear(weights, "q", np.array([1.0, 10.0])), [21.0, 43.0, 65.0])


def test_softmax_by_hand() -> None:
    np.testing.assert_allclose(softmax(np.log([[1.0, 3.0], [1.0, 1.0]])), [[0.25, 0.75], [0.5, 0.5]], **EXACT)
    np.testing.assert_allclose(log_softmax(np.log([1.0, 3.0])), np.log([0.25, 0.75]), **EXACT)


def test_softmax_rows_sum_to_one_and_ignore_a_shift() -> None:
    x = values(3, 5)
    np.testing.assert_allclose(softmax(x).sum(axis=-1), 1, **EXACT)
    np.testing.assert_allclose(softmax(x + 1e4), softmax(x), rtol=1e-11)  # 1e4 costs four of sixteen digits


def test_softmax_of_huge_scores_is_finite() -> None:
    np.testing.assert_array_equal(softmax(np.array([1e300, -1e300, 0.0])), [1, 0, 0])
    np.testing.assert_array_equal(log_softmax(np.array([1e5, 0.0])), [0, -1e5])


def test_softmax_gives_nothing_to_minus_infinity() -> None:
    np.testing.assert_array_equal(softmax(np.array([0.0, -np.inf, 0.0])), [0.5, 0, 0.5])


def test_softmax_of_an_empty_row_raises_and_is_never_uniform() -> None:
    for function in (softmax, log_softmax):
        with pytest.raises(ValueError, match="0/0"):
            function(np.array([[0.0, 1.0], [-np.inf, -np.inf]]))


def test_layer_norm_by_hand() -> None:
    """Mean 2, variance (4 + 0 + 4)/3 = 8/3, eps 1/3: the root is sqrt(3)."""
    y = layer_norm(np.array([0.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, 0.0]), 1 / 3)
    np.testing.assert_allclose(y, [-2 / np.sqrt(3), 1, 6 / np.sqrt(3)], **EXACT)


def test_rms_norm_by_hand() -> None:
    """Mean square (9 + 16)/2 = 12.5, eps 3.5: the root is 4."""
    np.testing.assert_allclose(rms_norm(np.array([3.0, 4.0]), np.array([1.0, 2.0]), 3.5), [0.75, 2.0], **EXACT)


def test_norms_equal_torch() -> None:
    x, weight, bias = values(2, 3, 7), values(7), values(7)[::-1].copy()
    weights = {"n.weight": weight, "n.bias": bias}
    tensors = [torch.tensor(a) for a in (x, weight, bias)]
    theirs = torch.nn.functional.layer_norm(tensors[0], (7,), tensors[1], tensors[2], 1e-5)
    np.testing.assert_allclose(normalize(gf.LayerNorm(), weights, "n", x), theirs.numpy(), rtol=1e-12, atol=1e-14)
    theirs = torch.nn.functional.rms_norm(tensors[0], (7,), tensors[1], 1e-6)
    np.testing.assert_allclose(normalize(gf.RMSNorm(), weights, "n", x), theirs.numpy(), rtol=1e-12, atol=1e-14)


def test_a_constant_row_normalises_to_the_bias() -> None:
    y = layer_norm(np.full(5, 3.0), np.ones(5), np.arange(5.0), 1e-5)
    np.testing.assert_array_equal(y, np.arange(5.0))


def test_activations_equal_those_of_transformers() -> None:
    x = np.linspace(-6, 6, 41)
    names = {"relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu", "tanh": "tanh"}
    for ours, theirs in names.items():
        expected = ACT2FN[theirs](torch.tensor(x)).numpy()
        np.testing.assert_allclose(activate(ours, x), expected, rtol=1e-11, atol=1e-15, err_msg=ours)  # type: ignore[arg-type]


def test_activations_are_finite_far_out() -> None:
    for name in ("relu", "gelu", "gelu_tanh", "silu", "tanh"):
        y = activate(name, np.array([-800.0, 800.0]))  # type: ignore[arg-type]
        np.testing.assert_allclose(y, [-1, 1] if name == "tanh" else [0, 800], atol=1e-12)
