"""The small operations every Transformer is made of: linear map, softmax, the two norms, six activations.

Each formula is written once, in float64, in the order a reader would do it by hand. The gradients of the same
operations are in `backward_ops`.
"""

import math
from typing import assert_never

import numpy as np

from glassformer.config import Activation, LayerNorm, Norm, RMSNorm
from glassformer.reference.arrays import Array, Params

_erf = np.vectorize(math.erf, otypes=[np.float64])


def linear(weights: Params, name: str, x: Array) -> Array:
    """x W^T + b over the last axis: (..., in) -> (..., out). W is `name.weight` (out, in), b `name.bias` if any."""
    y = x @ weights[f"{name}.weight"].T
    if f"{name}.bias" in weights:
        y = y + weights[f"{name}.bias"]
    return y


def softmax(scores: Array) -> Array:
    """e^(s_j) / sum_k e^(s_k) over the last axis; -inf gets probability 0.

    The largest score is subtracted first: it cancels in the quotient and keeps e^s from overflowing. Raises ValueError
    on a row that is -inf throughout, for 0/0 has no answer (a uniform row would be an invention).
    """
    top = scores.max(axis=-1, keepdims=True)
    if np.any(np.isneginf(top)):
        raise ValueError("softmax of a row that is -inf throughout is 0/0: a query must see at least one key.")
    exponentials = np.exp(scores - top)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def log_softmax(scores: Array) -> Array:
    """s_j - log sum_k e^(s_k) over the last axis, computed as (s_j - m) - log sum_k e^(s_k - m) with m = max s."""
    top = scores.max(axis=-1, keepdims=True)
    if np.any(np.isneginf(top)):
        raise ValueError("log_softmax of a row that is -inf throughout is 0/0: keep at least one finite score.")
    shifted = scores - top
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """(x - mean) / sqrt(var + eps) * weight + bias; var divides by D, eps stands inside the root. Ba et al. 2016."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    y = centred / np.sqrt(variance + eps) * weight
    return y if bias is None else y + bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight; no mean is subtracted, eps inside the root. Zhang and Sennrich 2019."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def normalize(norm: Norm, weights: Params, name: str, x: Array) -> Array:
    """The norm that the config names, with the parameters `name.weight` and, where it has one, `name.bias`."""
    match norm:
        case LayerNorm():
            return layer_norm(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), norm.eps)
        case RMSNorm():
            return rms_norm(x, weights[f"{name}.weight"], norm.eps)
        case _:
            assert_never(norm)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x), written as (1 + tanh(x/2)) / 2, which never overflows."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def gelu_tanh_argument(x: Array) -> Array:
    """sqrt(2/pi) (x + 0.044715 x^3): the inside of the tanh in GELU's approximation. Hendrycks and Gimpel 2016, 2."""
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def normal_cdf(x: Array) -> Array:
    """Phi(x) = (1 + erf(x / sqrt 2)) / 2, the share of a standard normal below x."""
    return 0.5 * (1 + _erf(x / math.sqrt(2)))


def activate(name: Activation, x: Array) -> Array:
    """One of the six activations, elementwise.

    relu max(x, 0); relu2 max(x, 0)^2 (So et al. 2021); gelu x Phi(x); gelu_tanh x (1 + tanh(...)) / 2, the
    approximation GPT-2 uses; silu x sigmoid(x); tanh.
    """
    match name:
        case "relu":
            return np.maximum(x, 0)
        case "relu2":
            return np.maximum(x, 0) ** 2
        case "gelu":
            return x * normal_cdf(x)
        case "gelu_tanh":
            return 0.5 * x * (1 + np.tanh(gelu_tanh_argument(x)))
        case "silu":
            return x * sigmoid(x)
        case "tanh":
            return np.tanh(x)
