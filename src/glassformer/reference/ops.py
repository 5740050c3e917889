"""The basic operations of a Transformer: linear layer, softmax, LayerNorm, RMSNorm and the activation functions.

Each formula is computed directly in float64. The gradients of these operations are in `backward_ops`.
"""

import math

import numpy as np

from glassformer.config import Activation, LayerNorm, Norm
from glassformer.reference.arrays import Array, Params

_erf = np.vectorize(math.erf, otypes=[np.float64])


def linear(weights: Params, name: str, x: Array) -> Array:
    """Apply a linear layer to the last axis, y = x W^T + b: (..., in) -> (..., out).

    W is `NAME.weight`, stored as (out, in). b is `NAME.bias`, if the layer has one.
    """
    y = x @ weights[f"{name}.weight"].T
    if f"{name}.bias" in weights:
        y = y + weights[f"{name}.bias"]
    return y


def softmax(scores: Array) -> Array:
    """Return p_j = e^(s_j) / sum_k e^(s_k) over the last axis. A score of -inf gets probability 0.

    The maximum is subtracted first; it cancels in the quotient and prevents overflow.

    Raises:
        ValueError: all scores along the last axis are -inf, so that the quotient is 0/0.
    """
    maximum = scores.max(axis=-1, keepdims=True)
    if np.any(np.isneginf(maximum)):
        raise ValueError("softmax over scores that are all -inf is 0/0: a query must attend to at least one key.")
    exponentials = np.exp(scores - maximum)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def log_softmax(scores: Array) -> Array:
    """Return log p_j = s_j - log sum_k e^(s_k) over the last axis.

    It is computed as (s_j - m) - log sum_k e^(s_k - m) with m = max s, which prevents overflow.

    Raises:
        ValueError: all scores along the last axis are -inf.
    """
    maximum = scores.max(axis=-1, keepdims=True)
    if np.any(np.isneginf(maximum)):
        raise ValueError("log_softmax over scores that are all -inf is 0/0: at least one score must be finite.")
    shifted = scores - maximum
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def layer_norm(x: Array, weight: Array | float, bias: Array | None, eps: float) -> Array:
    """Return (x - mean) / sqrt(var + eps) * weight + bias over the last axis.

    The variance is the biased one (it divides by D), and eps is inside the square root. Ba et al. 2016.
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    y = centred / np.sqrt(variance + eps) * weight
    return y if bias is None else y + bias


def rms_norm(x: Array, weight: Array | float, eps: float) -> Array:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis. eps is inside the square root.

    Zhang and Sennrich 2019.
    """
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def normalize(norm: Norm, weights: Params, name: str, x: Array) -> Array:
    """Apply LayerNorm or RMSNorm, as the config says, with the parameters `NAME.weight` and `NAME.bias` (if any)."""
    if isinstance(norm, LayerNorm):
        return layer_norm(x, norm_scale(norm, weights, name), weights.get(f"{name}.bias"), norm.eps)
    return rms_norm(x, norm_scale(norm, weights, name), norm.eps)


def norm_scale(norm: Norm, weights: Params, name: str) -> Array | float:
    """Return the factor of a norm, offset + weight: (W,), or (H,1,K) if each head has a weight; 1 without a weight."""
    if not norm.weight:
        return 1.0
    scale = norm.offset + weights[f"{name}.weight"]
    return scale[:, None] if scale.ndim == 2 else scale


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + e^-x), computed as (1 + tanh(x/2)) / 2, which cannot overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def gelu_tanh_argument(x: Array) -> Array:
    """Return sqrt(2/pi) (x + 0.044715 x^3), the argument of tanh in the approximation of GELU.

    Hendrycks and Gimpel 2016, section 2.
    """
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def normal_cdf(x: Array) -> Array:
    """Return Phi(x) = (1 + erf(x / sqrt 2)) / 2, the cumulative distribution function of the standard normal."""
    return 0.5 * (1 + _erf(x / math.sqrt(2)))


def activate(name: Activation, x: Array) -> Array:
    """Apply an activation function elementwise.

    relu       max(x, 0)
    relu2      max(x, 0)^2                                           So et al. 2021
    gelu       x Phi(x)                                              Hendrycks and Gimpel 2016
    gelu_tanh  x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2       the approximation that GPT-2 uses
    silu       x sigmoid(x)
    tanh       tanh(x)
    quick_gelu x sigmoid(1.702 x)
    """
    match name:
        case "quick_gelu":
            return x * sigmoid(1.702 * x)
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
