"""Gradient of attention, derived by hand: the steps of `attention` in attention.py, from the last to the first."""

from typing import NamedTuple

import numpy as np

from glassformer.config import Latent, ModelConfig, Rotary
from glassformer.reference.arrays import Array, Params, Saved
from glassformer.reference.attention import CosSin, join_heads, repeat_kv_heads, split_heads
from glassformer.reference.backward_ops import linear_backward, normalize_backward, softmax_backward
from glassformer.reference.positions import rotate


class AttentionGradients(NamedTuple):
    """Gradients of the loss with respect to the inputs, the scores and the parameters of one attention layer."""

    x: Array
    """(B,T,D): input of the queries. In self-attention the gradient of the input is x + memory."""
    memory: Array
    """(B,S,D): input of the keys and values."""
    keys: Array
    """(B,S,D): the part of `memory` that flows through the keys. A query/key position embedding gets x + keys."""
    scores: Array
    """(B,H,T,S): scores, and therefore also any bias added to them."""
    params: Params
    """Parameters, by their names within the layer."""


def attention_backward(
    config: ModelConfig,
    weights: Params,
    saved: Saved,
    d_out: Array,
    cos_sin: CosSin | None = None,
    rotary: Rotary | None = None,
) -> AttentionGradients:
    """Backward pass of `attention`, given d_out (B,T,D) and the activations that `attention` saved.

    With c the scale and P the pattern:

        heads_i = sum_j P_ij v_j          d_P_ij = d_heads_i . v_j           d_v_j = sum_i P_ij d_heads_i
        P = softmax(scores)               d_scores = P (d_P - sum_j P d_P)   (0 where the mask makes P = 0)
        scores_ij = c q_i . k_j + bias    d_q_i = c sum_j d_scores_ij k_j    d_k_j = c sum_i d_scores_ij q_i

    A soft cap a multiplies d_scores by 1 - (s/a)^2, where s is the capped score. The formula of the softmax also holds
    for the keys next to a sink, whose own d_P is 0: its gradient is -P_sink sum_j P_j d_P_j, where P_sink is
    1 - sum_j P_j, summed over all queries of the head.

    H/G query heads read the same key/value head, so its gradient is the sum of theirs. The gradient of the bias is
    d_scores. A query/key position embedding p changes the input of q to x + p and the input of k to memory + p, so its
    gradient is the sum of the gradients of both inputs; v does not contribute.
    """
    q, k, v, pattern, heads = (saved[name] for name in ("q", "k", "v", "pattern", "heads"))
    H, G = config.n_heads, config.n_kv_heads
    rotary = config.position if rotary is None and isinstance(config.position, Rotary) else rotary
    d_joined, params = linear_backward(weights, "o", join_heads(heads), d_out)
    d_heads = split_heads(d_joined, H)  # (B, H, T, U)
    d_pattern = d_heads @ repeat_kv_heads(v, H).transpose(0, 1, 3, 2)  # (B, H, T, S)
    d_v = repeat_kv_heads_backward(pattern.transpose(0, 1, 3, 2) @ d_heads, G)  # (B, G, S, U)
    d_scores = softmax_backward(pattern, d_pattern)
    if config.attention.sinks:
        taken = (pattern * d_pattern).sum(axis=-1)  # (B, H, T)
        params["sinks"] = -((1 - pattern.sum(axis=-1)) * taken).sum(axis=(0, 2))
    d_products = d_scores
    if config.attention.softcap is not None:
        d_products = d_scores * (1 - (saved["capped"] / config.attention.softcap) ** 2)
    d_q = config.scale * d_products @ repeat_kv_heads(k, H)  # (B, H, T, K)
    d_k = repeat_kv_heads_backward(config.scale * d_products.transpose(0, 1, 3, 2) @ q, G)  # (B, G, S, K)
    if config.attention.latent is not None:
        d_x, d_memory, gradients = latent_backward(
            config.attention.latent, weights, saved, (d_q, d_k, d_v), rotary, cos_sin
        )
        return AttentionGradients(d_x, d_memory, d_memory, d_scores, params | gradients)
    d_q, q_gradients = prepare_backward(config, weights, "q", saved, d_q, rotary, cos_sin)
    d_k, k_gradients = prepare_backward(config, weights, "k", saved, d_k, rotary, cos_sin)
    params |= q_gradients | k_gradients
    d_x, q_gradients = linear_backward(weights, "q", saved["q_input"], join_heads(d_q))
    d_from_k, k_gradients = linear_backward(weights, "k", saved["k_input"], join_heads(d_k))
    d_v = clip_backward(config, saved["v_raw"], d_v)
    d_from_v, v_gradients = linear_backward(weights, "v", saved["memory"], join_heads(d_v))
    params |= q_gradients | k_gradients | v_gradients
    return AttentionGradients(d_x, d_from_k + d_from_v, d_from_k, d_scores, params)


def latent_backward(
    latent: Latent,
    weights: Params,
    saved: Saved,
    d_heads: tuple[Array, Array, Array],
    rotary: Rotary | None,
    cos_sin: CosSin | None,
) -> tuple[Array, Array, Params]:
    """Backward pass of `latent_heads`: the gradients of q, k and v -> d_x (B,T,D), d_memory (B,S,D) and parameters.

    All heads read the same shared components of the keys, so their gradient is the sum over the heads. c is the input
    of k_h and of v_h, so its gradient is the sum of both.
    """
    d_q, d_k, d_v = d_heads
    d_shared = d_k[..., : latent.d_shared].sum(axis=1, keepdims=True)
    if cos_sin is not None and rotary is not None:
        d_q, d_shared = rotate_backward(rotary, d_q, cos_sin), rotate_backward(rotary, d_shared, cos_sin)
    d_from_k, gradients = linear_backward(weights, "k", saved["kv_low"], join_heads(d_k[..., latent.d_shared :]))
    d_from_v, v_gradients = linear_backward(weights, "v", saved["kv_low"], join_heads(d_v))
    d_low, norm_gradients = normalize_backward(
        latent.norm, weights, "kv_down_norm", saved["kv_down"], d_from_k + d_from_v
    )
    d_memory, down_gradients = linear_backward(weights, "kv_down", saved["memory"], d_low)
    d_from_shared, shared_gradients = linear_backward(weights, "k_shared", saved["memory"], join_heads(d_shared))
    gradients |= v_gradients | norm_gradients | down_gradients | shared_gradients
    d_x, q_gradients = linear_backward(weights, "q", saved["q_low"], join_heads(d_q))
    if latent.q_rank is not None:
        d_x, norm_gradients = normalize_backward(latent.norm, weights, "q_down_norm", saved["q_down"], d_x)
        d_x, down_gradients = linear_backward(weights, "q_down", saved["q_input"], d_x)
        q_gradients |= norm_gradients | down_gradients
    return d_x, d_memory + d_from_shared, gradients | q_gradients


def prepare_backward(
    config: ModelConfig,
    weights: Params,
    name: str,
    saved: Saved,
    d_y: Array,
    rotary: Rotary | None,
    cos_sin: CosSin | None,
) -> tuple[Array, Params]:
    """Backward pass of `prepare`: the norm after the rotation, the rotation, the clip, the norm before the rotation."""
    norm, over, last = config.attention.qk_norm, config.attention.qk_norm_over, config.attention.qk_norm_after_rotation
    gradients: Params = {}
    if norm is not None and last:
        d_y, gradients = normalize_backward(norm, weights, f"{name}_norm", saved[f"{name}_rotated"], d_y)
    if cos_sin is not None and rotary is not None:
        d_y = rotate_backward(rotary, d_y, cos_sin)
    d_y = clip_backward(config, saved[f"{name}_unclipped"], d_y)
    if norm is None or last:
        return d_y, gradients
    raw = saved[f"{name}_raw"]
    if over != "all":
        return normalize_backward(norm, weights, f"{name}_norm", raw, d_y)
    d_joined, gradients = normalize_backward(norm, weights, f"{name}_norm", join_heads(raw), join_heads(d_y))
    return split_heads(d_joined, raw.shape[1]), gradients


def clip_backward(config: ModelConfig, x: Array, d_y: Array) -> Array:
    """Backward pass of `clip`: the gradient is 0 where x was limited."""
    limit = config.attention.clip
    return d_y if limit is None else np.where(np.abs(x) <= limit, d_y, 0.0)


def repeat_kv_heads_backward(d_y: Array, G: int) -> Array:
    """Backward pass of `repeat_kv_heads`, (B,H,S,width) -> (B,G,S,width): sum over the H/G copies of each head."""
    B, H, S, width = d_y.shape
    return d_y.reshape(B, G, H // G, S, width).sum(axis=2)


def rotate_backward(rotary: Rotary, d_y: Array, cos_sin: CosSin) -> Array:
    """Backward pass of `rotate`. y = R x with a rotation matrix R, so d_x = R^T d_y: the rotation by minus the angle.

    cos is unchanged and sin changes sign. YaRN's factor scales both, hence R and R^T alike.
    """
    cos, sin = cos_sin
    return rotate(rotary, d_y, cos, -sin)


def t5_bias_backward(shape: tuple[int, ...], buckets: np.ndarray, d_scores: Array) -> Array:
    """Return the gradient of the T5 bias table, whose shape is `shape`.

    bias_h(i,j) = table[bucket(i,j), h], so the gradient of an entry is the sum of d_scores_h over the pairs (i,j) in
    its bucket. `buckets` is (B,T,T), `d_scores` is (B,H,T,T).
    """
    d_table = np.zeros(shape)
    np.add.at(d_table, buckets, np.moveaxis(d_scores, 1, -1))  # (B, T, T) selects rows of length H
    return d_table
