"""Multi-head attention: each query position takes a mean of the values, weighted by query-key similarity.

One function computes self-attention (memory is x) and cross-attention (memory is the output of the encoder). H query
heads share G key/value heads: G = H is multi-head attention, G = 1 is multi-query, and anything between is
grouped-query.
"""

import numpy as np

from glassformer.config import ModelConfig, Rotary
from glassformer.reference.arrays import Array, Mask, Params, Saved
from glassformer.reference.ops import linear, normalize, softmax
from glassformer.reference.positions import rotate

CosSin = tuple[Array, Array]
"""cos and sin of the rotary angles, (B,T,R/2) each, where R is the number of rotated components of a head."""


def split_heads(x: Array, heads: int) -> Array:
    """Split the last axis into heads: (B,T,heads*width) -> (B,heads,T,width).

    Head h holds the components h*width to (h+1)*width - 1.
    """
    B, T, width = x.shape
    return x.reshape(B, T, heads, width // heads).transpose(0, 2, 1, 3)


def join_heads(x: Array) -> Array:
    """Concatenate the heads: (B,heads,T,width) -> (B,T,heads*width), the inverse of `split_heads`."""
    B, heads, T, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, heads * width)


def repeat_kv_heads(x: Array, H: int) -> Array:
    """Repeat each key/value head H/G times: (B,G,S,width) -> (B,H,S,width).

    Query head h reads key/value head h // (H/G), so the copies of one head are adjacent.
    """
    return np.repeat(x, H // x.shape[1], axis=1)


def attention(
    config: ModelConfig,
    weights: Params,
    x: Array,
    memory: Array,
    allowed: Mask,
    bias: Array | None = None,
    cos_sin: CosSin | None = None,
    qk_position: Array | None = None,
) -> tuple[Array, Saved]:
    """Compute one attention layer: (B,T,D) -> (B,T,D).

        pattern = softmax(scale * q k^T + bias),   out = (pattern v) W_o^T + b_o

    Args:
        x: (B,T,D), the input of the queries.
        memory: (B,S,D), the input of the keys and values.
        allowed: (B,T,S), True = may attend. A masked score is set to -inf, so its probability is exactly 0.
        bias: (B,H,T,S), added to the scores (ALiBi, T5).
        cos_sin: rotates q and k (rotary positions).
        qk_position: (B,T,D), the query/key position embedding. It is added to the input of q and k, not of v.

    With `qk_norm`, queries and keys are normalized per head, before the rotation.

    Vaswani et al. 2017, section 3.2; grouped-query attention: Ainslie et al. 2023.
    """
    H, G = config.n_heads, config.n_kv_heads
    q_input, k_input = (x, memory) if qk_position is None else (x + qk_position, memory + qk_position)
    q = q_raw = split_heads(linear(weights, "q", q_input), H)  # (B, H, T, K)
    k = k_raw = split_heads(linear(weights, "k", k_input), G)  # (B, G, S, K)
    v = split_heads(linear(weights, "v", memory), G)  # (B, G, S, U)
    if config.attention.qk_norm is not None:
        q = normalize(config.attention.qk_norm, weights, "q_norm", q)
        k = normalize(config.attention.qk_norm, weights, "k_norm", k)
    if cos_sin is not None:
        assert isinstance(config.position, Rotary)
        q = rotate(config.position, q, *cos_sin)
        k = rotate(config.position, k, *cos_sin)
    scores = config.scale * q @ repeat_kv_heads(k, H).transpose(0, 1, 3, 2)  # (B, H, T, S)
    if bias is not None:
        scores = scores + bias
    scores = np.where(allowed[:, None], scores, -np.inf)
    pattern = softmax(scores)
    heads = pattern @ repeat_kv_heads(v, H)  # (B, H, T, U)
    out = linear(weights, "o", join_heads(heads))
    saved = {"q_input": q_input, "k_input": k_input, "memory": memory, "q_raw": q_raw, "k_raw": k_raw}
    saved |= {"q": q, "k": k, "v": v}
    return out, saved | {"scores": scores, "pattern": pattern, "heads": heads, "out": out}
