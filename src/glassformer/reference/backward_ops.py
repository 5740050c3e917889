"""Gradients of the basic operations, derived by hand.

Every function receives d_y, the gradient of the loss with respect to the output (in the shape of the output), and
returns the gradient with respect to the input and the parameters. Each is an application of the chain rule,
d_x_i = sum_j d_y_j dy_j/dx_i. [i = j] is 1 if i equals j, otherwise 0.
"""

import math

import numpy as np

from glassformer.config import Activation, LayerNorm, Norm
from glassformer.reference.arrays import Array, Mask, Params, Tokens
from glassformer.reference.ops import gelu_tanh_argument, log_softmax, norm_scale, normal_cdf, sigmoid

IGNORE = -100
"""Positions whose target has this value are ignored by the loss."""


def cross_entropy(logits: Array, targets: Tokens) -> float:
    """Return the mean of -log softmax(logits)[target] over all targets that are not ignored: (B,T,V), (B,T) -> scalar.

    The loss is in nats per token.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets have shape {targets.shape}, but there are logits for {logits.shape[:-1]}: both must be (B, T)."
        )
    counted = _counted(targets)
    log_probabilities = log_softmax(logits)[counted]  # (N, V)
    return float(-log_probabilities[np.arange(len(log_probabilities)), targets[counted]].mean())


def cross_entropy_backward(logits: Array, targets: Tokens) -> Array:
    """Return the gradient of `cross_entropy` with respect to the logits (B,T,V).

    The loss at one position with logits z and target t is l = -z_t + log sum_k e^(z_k). Over N counted positions:

        d_z_j = (softmax(z)_j - [j = t]) / N

    Each d_z sums to 0 over the vocabulary. It is 0 at positions that are ignored.
    """
    counted = _counted(targets)
    d_logits = np.zeros_like(logits)
    d_counted = np.exp(log_softmax(logits[counted]))  # (N, V)
    d_counted[np.arange(len(d_counted)), targets[counted]] -= 1
    d_logits[counted] = d_counted / len(d_counted)
    return d_logits


def _counted(targets: Tokens) -> Mask:
    counted = targets != IGNORE
    if not counted.any():
        raise ValueError(f"all targets are {IGNORE}, so the mean loss is undefined: give at least one target id.")
    return counted


def linear_backward(weights: Params, name: str, x: Array, d_y: Array) -> tuple[Array, Params]:
    """Backward pass of `linear`.

        y_o = sum_i W_oi x_i + b_o
        d_x_i = sum_o W_oi d_y_o,   d_W_oi = d_y_o x_i,   d_b_o = d_y_o

    All positions share W and b, so d_W and d_b are summed over all leading axes (batch and positions).
    """
    d_x = d_y @ weights[f"{name}.weight"]
    flat_x, flat_d_y = x.reshape(-1, x.shape[-1]), d_y.reshape(-1, d_y.shape[-1])
    gradients = {f"{name}.weight": flat_d_y.T @ flat_x}
    if f"{name}.bias" in weights:
        gradients[f"{name}.bias"] = flat_d_y.sum(axis=0)
    return d_x, gradients


def softmax_backward(p: Array, d_p: Array) -> Array:
    """Backward pass of `softmax` over the last axis, given its output p.

        dp_k/ds_j = p_k ([k = j] - p_j),   so   d_s_j = p_j (d_p_j - sum_k p_k d_p_k)

    At masked scores p_j = 0, so the gradient is exactly 0.
    """
    return p * (d_p - (p * d_p).sum(axis=-1, keepdims=True))


def normalize_backward(norm: Norm, weights: Params, name: str, x: Array, d_y: Array) -> tuple[Array, Params]:
    """Backward pass of `normalize`: LayerNorm or RMSNorm, as the config says.

    A constant offset that is added to the weight does not change the gradient of the weight.
    """
    scale = norm_scale(norm, weights, name)
    gradients: Params = {}
    if isinstance(norm, LayerNorm):
        d_x, d_weight, d_bias = layer_norm_backward(x, scale, norm.eps, d_y)
        gradients |= {f"{name}.bias": d_bias} if norm.bias else {}
    else:
        d_x, d_weight = rms_norm_backward(x, scale, norm.eps, d_y)
    if norm.weight:
        gradients[f"{name}.weight"] = d_weight
    return d_x, gradients


def _sum_like(values: Array, weight: Array | float) -> Array:
    """Sum over all vectors that share a weight: (..., W) -> (W,), or (B,H,T,K) -> (H,K) if each head has a weight."""
    if np.ndim(weight) == 3:
        return values.sum(axis=(0, 2))
    return values.sum(axis=tuple(range(values.ndim - 1)))


def layer_norm_backward(x: Array, weight: Array | float, eps: float, d_y: Array) -> tuple[Array, Array, Array]:
    """Backward pass of `layer_norm`; returns d_x, d_w and d_b.

        y = n w + b,   n = (x - m)/s,   m = mean(x),   s = sqrt(mean((x - m)^2) + eps)
        d_w = sum d_y n,   d_b = sum d_y   (sums over all positions),   d_n = d_y w

    Since dm/dx_i = 1/D and ds/dx_i = (x_i - m)/(D s) = n_i/D:

        dn_j/dx_i = ([i = j] - 1/D)/s - (x_j - m)/s^2 * n_i/D = ([i = j] - 1/D - n_i n_j/D)/s
        d_x_i = (d_n_i - mean(d_n) - n_i mean(d_n n))/s

    The two means remove the directions in which y does not change: a shift of x and, up to eps, a rescaling of x.
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    n = centred / s
    d_n = d_y * weight
    d_x = (d_n - d_n.mean(axis=-1, keepdims=True) - n * (d_n * n).mean(axis=-1, keepdims=True)) / s
    return d_x, _sum_like(d_y * n, weight), _sum_like(d_y, 1.0)


def rms_norm_backward(x: Array, weight: Array | float, eps: float, d_y: Array) -> tuple[Array, Array]:
    """Backward pass of `rms_norm`; returns d_x and d_w.

        y = n w,   n = x/r,   r = sqrt(mean(x^2) + eps)
        dr/dx_i = x_i/(D r) = n_i/D
        dn_j/dx_i = [i = j]/r - x_j/r^2 * n_i/D = ([i = j] - n_i n_j/D)/r
        d_x_i = (d_n_i - n_i mean(d_n n))/r

    This is the formula of LayerNorm without its first mean.
    """
    r = np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    n = x / r
    d_n = d_y * weight
    d_x = (d_n - n * (d_n * n).mean(axis=-1, keepdims=True)) / r
    return d_x, _sum_like(d_y * n, weight)


def activation_derivative(name: Activation, x: Array) -> Array:
    """Return the derivative of the activation at x, elementwise.

    relu       1 where x > 0, else 0 (0 at x = 0, as in PyTorch)
    relu2      2 max(x, 0)
    gelu       (x Phi)' = Phi + x phi,   phi(x) = e^(-x^2/2)/sqrt(2 pi)
    gelu_tanh  (x (1 + t)/2)' = (1 + t)/2 + x (1 - t^2) u'/2,   t = tanh(u),
               u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2)
    silu       (x s)' = s + x s (1 - s),   s = sigmoid(x)
    tanh       1 - tanh^2
    quick_gelu s + a x s (1 - s),   a = 1.702, s = sigmoid(a x)
    """
    match name:
        case "quick_gelu":
            s = sigmoid(1.702 * x)
            return s + 1.702 * x * s * (1 - s)
        case "relu":
            return (x > 0).astype(np.float64)
        case "relu2":
            return 2 * np.maximum(x, 0)
        case "gelu":
            return normal_cdf(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        case "gelu_tanh":
            t = np.tanh(gelu_tanh_argument(x))
            du_dx = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
            return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * du_dx
        case "silu":
            s = sigmoid(x)
            return s + x * s * (1 - s)
        case "tanh":
            return 1 - np.tanh(x) ** 2


def lookup_backward(shape: tuple[int, ...], rows: Tokens, d_y: Array) -> Array:
    """Backward pass of an embedding lookup y = table[rows]; returns d_table, whose shape is `shape`.

    The gradient of row r is the sum of d_y over all positions that read it.
    """
    d_table = np.zeros(shape)
    np.add.at(d_table, rows, d_y)  # `d_table[rows] += d_y` would count a row that occurs twice only once
    return d_table
