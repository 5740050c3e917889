"""Gradient of attention, derived by hand: `attention` of attention.py, read from its last line to its first."""

from typing import NamedTuple

import numpy as np

from glassformer.config import ModelConfig, Rotary
from glassformer.reference.arrays import Array, Params, Saved
from glassformer.reference.attention import Waves, join_heads, share_heads, split_heads
from glassformer.reference.backward_ops import linear_backward, normalize_backward, softmax_backward
from glassformer.reference.positions import rotate


class AttentionGradients(NamedTuple):
    x: Array
    """(B,T,D): with respect to what asked. In self-attention the whole gradient is x + memory."""
    memory: Array
    """(B,S,D): with respect to what answered."""
    keys: Array
    """(B,S,D): the part of `memory` that came through the keys. What is infused gets x + keys."""
    scores: Array
    """(B,H,T,S): with respect to the scores, and so to whatever was added to them."""
    params: Params


def attention_backward(
    config: ModelConfig, weights: Params, saved: Saved, d_out: Array, waves: Waves | None = None
) -> AttentionGradients:
    """scores = c q k^T + bias, P = softmax(scores), heads = P v, out = heads W_o^T; c is the scale.

    heads_i = sum_j P_ij v_j       d_P_ij = d_heads_i . v_j           d_v_j = sum_i P_ij d_heads_i
    P = softmax(scores)            d_scores = P (d_P - sum_j P d_P)   (0 where the mask put P = 0)
    scores_ij = c q_i . k_j        d_q_i = c sum_j d_scores_ij k_j    d_k_j = c sum_i d_scores_ij q_i
    A key/value head that H/G query heads read gets the sum of their gradients. The additive bias gets d_scores itself.
    Query/key positions p make q read x + p and k read memory + p: a sum passes its gradient on to both, so p gets what
    q and k send back together, and v sends it nothing.
    """
    q, k, v, pattern, heads = (saved[name] for name in ("q", "k", "v", "pattern", "heads"))
    H, G = config.n_heads, config.n_kv_heads
    d_joined, params = linear_backward(weights, "o", join_heads(heads), d_out)
    d_heads = split_heads(d_joined, H)  # (B, H, T, U)
    d_pattern = d_heads @ share_heads(v, H).transpose(0, 1, 3, 2)  # (B, H, T, S)
    d_v = share_heads_backward(pattern.transpose(0, 1, 3, 2) @ d_heads, G)  # (B, G, S, U)
    d_scores = softmax_backward(pattern, d_pattern)
    d_q = config.scale * d_scores @ share_heads(k, H)  # (B, H, T, K)
    d_k = share_heads_backward(config.scale * d_scores.transpose(0, 1, 3, 2) @ q, G)  # (B, G, S, K)
    if waves is not None:
        d_q, d_k = rotate_backward(config, d_q, waves), rotate_backward(config, d_k, waves)
    if config.attention.qk_norm is not None:
        d_q, q_gradients = normalize_backward(config.attention.qk_norm, weights, "q_norm", saved["q_raw"], d_q)
        d_k, k_gradients = normalize_backward(config.attention.qk_norm, weights, "k_norm", saved["k_raw"], d_k)
        params |= q_gradients | k_gradients
    d_x, q_gradients = linear_backward(weights, "q", saved["asking"], join_heads(d_q))
    d_from_k, k_gradients = linear_backward(weights, "k", saved["answering"], join_heads(d_k))
    d_from_v, v_gradients = linear_backward(weights, "v", saved["memory"], join_heads(d_v))
    params |= q_gradients | k_gradients | v_gradients
    return AttentionGradients(d_x, d_from_k + d_from_v, d_from_k, d_scores, params)


def share_heads_backward(d_y: Array, G: int) -> Array:
    """(B,H,S,width) -> (B,G,S,width): head g was copied to H/G query heads, so their gradients are added up."""
    B, H, S, width = d_y.shape
    return d_y.reshape(B, G, H // G, S, width).sum(axis=2)


def rotate_backward(config: ModelConfig, d_y: Array, waves: Waves) -> Array:
    """y = R x with a rotation R of each plane, so d_x = R^T d_y: the same turn by minus the angle.

    cos stays and sin changes sign; YaRN's factor on both waves is a factor on R and stays.
    """
    assert isinstance(config.position, Rotary)
    cos, sin = waves
    return rotate(config.position, d_y, cos, -sin)


def t5_bias_backward(shape: tuple[int, ...], buckets: np.ndarray, d_scores: Array) -> Array:
    """bias_h(i,j) = table[bucket(i,j), h]: an entry gets the sum of d_scores_h over all pairs in its bucket."""
    d_table = np.zeros(shape)
    np.add.at(d_table, buckets, np.moveaxis(d_scores, 1, -1))  # (B, T, T) picks rows of width H
    return d_table
