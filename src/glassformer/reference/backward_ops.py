"""Gradients of the small operations, derived by hand.

Every function is given d_y, the gradient of the loss with respect to its output (same shape as the output), and
returns the gradient with respect to its input and its parameters. Only the chain rule is used: d_x = sum over all
outputs of d_y * dy/dx.
"""

import math

import numpy as np

from glassformer.config import Activation, LayerNorm, Norm
from glassformer.reference.arrays import Array, Mask, Params, Tokens
from glassformer.reference.ops import gelu_tanh_argument, log_softmax, normal_cdf, sigmoid

IGNORE = -100
"""A target with this id is not counted."""


def cross_entropy(logits: Array, targets: Tokens) -> float:
    """Mean over the counted targets of -log softmax(logits)[target]: (B,T,V), (B,T) -> one number."""
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets have shape {targets.shape}, but there are logits for {logits.shape[:-1]}.")
    counted = _counted(targets)
    log_probabilities = log_softmax(logits)[counted]  # (N, V)
    return float(-log_probabilities[np.arange(len(log_probabilities)), targets[counted]].mean())


def cross_entropy_backward(logits: Array, targets: Tokens) -> Array:
    """One place loses l = -z_t + log sum_k e^(z_k), so dl/dz_j = softmax(z)_j - [j = t]; the mean divides by N.

    A wrong token is pushed down by exactly the probability it was given, and each row of d_logits sums to 0.
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
        raise ValueError(f"no target is counted: all of them are {IGNORE}, and the mean of nothing has no value.")
    return counted


def linear_backward(weights: Params, name: str, x: Array, d_y: Array) -> tuple[Array, Params]:
    """y_o = sum_i W_oi x_i + b_o, hence d_x_i = sum_o W_oi d_y_o, d_W_oi = d_y_o x_i and d_b_o = d_y_o.

    W and b serve every place, so their gradients are summed over all leading axes (batch and time).
    """
    d_x = d_y @ weights[f"{name}.weight"]
    rows_x, rows_y = x.reshape(-1, x.shape[-1]), d_y.reshape(-1, d_y.shape[-1])
    gradients = {f"{name}.weight": rows_y.T @ rows_x}
    if f"{name}.bias" in weights:
        gradients[f"{name}.bias"] = rows_y.sum(axis=0)
    return d_x, gradients


def softmax_backward(p: Array, d_p: Array) -> Array:
    """dp_k/ds_j = p_k ([k = j] - p_j), so d_s_j = sum_k d_p_k p_k ([k = j] - p_j) = p_j (d_p_j - sum_k p_k d_p_k).

    Where p_j = 0 (masked) the gradient is exactly 0: nothing flows to what was not seen.
    """
    return p * (d_p - (p * d_p).sum(axis=-1, keepdims=True))


def normalize_backward(norm: Norm, weights: Params, name: str, x: Array, d_y: Array) -> tuple[Array, Params]:
    """Backward of the norm that the config names."""
    weight = weights[f"{name}.weight"]
    if isinstance(norm, LayerNorm):
        d_x, d_weight, d_bias = layer_norm_backward(x, weight, norm.eps, d_y)
        gradients = {f"{name}.weight": d_weight}
        return d_x, gradients | ({f"{name}.bias": d_bias} if norm.bias else {})
    d_x, d_weight = rms_norm_backward(x, weight, norm.eps, d_y)
    return d_x, {f"{name}.weight": d_weight}


def layer_norm_backward(x: Array, weight: Array, eps: float, d_y: Array) -> tuple[Array, Array, Array]:
    """y = n w + b with n = (x - m)/s, m = mean(x), s = sqrt(mean((x - m)^2) + eps). Gradients of x, w, b.

    d_w = sum d_y n, d_b = sum d_y, d_n = d_y w. Since dm/dx_i = 1/D and ds/dx_i = (x_i - m)/(D s) = n_i/D,
    dn_j/dx_i = ([i = j] - 1/D)/s - (x_j - m)/s^2 * n_i/D = ([i = j] - 1/D - n_i n_j/D)/s. Summing over j:
    d_x_i = (d_n_i - mean(d_n) - n_i mean(d_n n))/s. The two means are what the norm made invisible: a shift of x, and
    (up to eps) its size.
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    s = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
    n = centred / s
    d_n = d_y * weight
    d_x = (d_n - d_n.mean(axis=-1, keepdims=True) - n * (d_n * n).mean(axis=-1, keepdims=True)) / s
    places = tuple(range(x.ndim - 1))
    return d_x, (d_y * n).sum(axis=places), d_y.sum(axis=places)


def rms_norm_backward(x: Array, weight: Array, eps: float, d_y: Array) -> tuple[Array, Array]:
    """y = n w with n = x/r, r = sqrt(mean(x^2) + eps). Gradients of x and w.

    dr/dx_i = x_i/(D r) = n_i/D, so dn_j/dx_i = [i = j]/r - x_j/r^2 * n_i/D = ([i = j] - n_i n_j/D)/r and
    d_x_i = (d_n_i - n_i mean(d_n n))/r: LayerNorm's rule without its first mean.
    """
    r = np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)
    n = x / r
    d_n = d_y * weight
    d_x = (d_n - n * (d_n * n).mean(axis=-1, keepdims=True)) / r
    return d_x, (d_y * n).sum(axis=tuple(range(x.ndim - 1)))


def activation_slope(name: Activation, x: Array) -> Array:
    """The derivative of the activation at x, elementwise.

    relu       1 where x > 0, else 0 (0 at the kink, as everywhere in practice)
    relu2      2 max(x, 0)
    gelu       (x Phi)' = Phi + x phi, phi(x) = e^(-x^2/2)/sqrt(2 pi)
    gelu_tanh  (x (1 + t)/2)' = (1 + t)/2 + x (1 - t^2) u'/2, t = tanh(u), u' = sqrt(2/pi) (1 + 3 * 0.044715 x^2)
    silu       (x s)' = s + x s (1 - s), s = sigmoid(x)
    tanh       1 - tanh^2
    """
    match name:
        case "relu":
            return (x > 0).astype(np.float64)
        case "relu2":
            return 2 * np.maximum(x, 0)
        case "gelu":
            return normal_cdf(x) + x * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        case "gelu_tanh":
            t = np.tanh(gelu_tanh_argument(x))
            slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
            return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * slope
        case "silu":
            s = sigmoid(x)
            return s + x * s * (1 - s)
        case "tanh":
            return 1 - np.tanh(x) ** 2


def lookup_backward(shape: tuple[int, ...], rows: Tokens, d_y: Array) -> Array:
    """y = table[rows]: row r of the table gets the sum of d_y over all places that read it, and 0 if none did."""
    d_table = np.zeros(shape)
    np.add.at(d_table, rows, d_y)  # += would count a row that was read twice only once
    return d_table
