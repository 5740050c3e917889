"""Attention: every query takes a weighted mean of the values, weighted by how well their keys answer it.

One function serves self-attention (memory is x) and cross-attention (memory is the encoder's output), with H query
heads sharing G key/value heads: G = H is multi-head, G = 1 multi-query, between them grouped-query.
"""

import numpy as np

from glassformer.config import ModelConfig, Rotary
from glassformer.reference.arrays import Array, Mask, Params, Saved
from glassformer.reference.ops import linear, normalize, softmax
from glassformer.reference.positions import rotate

Waves = tuple[Array, Array]
"""cos and sin of the rotary angles, (B,T,R/2) each."""


def split_heads(x: Array, heads: int) -> Array:
    """(B,T,heads*width) -> (B,heads,T,width): head h owns components h*width to (h+1)*width."""
    B, T, width = x.shape
    return x.reshape(B, T, heads, width // heads).transpose(0, 2, 1, 3)


def join_heads(x: Array) -> Array:
    """(B,heads,T,width) -> (B,T,heads*width), the inverse of `split_heads`."""
    B, heads, T, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, heads * width)


def share_heads(x: Array, H: int) -> Array:
    """(B,G,S,width) -> (B,H,S,width): query head h reads key/value head h // (H/G), so each is repeated H/G times."""
    return np.repeat(x, H // x.shape[1], axis=1)


def attention(
    config: ModelConfig,
    weights: Params,
    x: Array,
    memory: Array,
    allowed: Mask,
    bias: Array | None = None,
    waves: Waves | None = None,
    infused: Array | None = None,
) -> tuple[Array, Saved]:
    """softmax(scale q k^T + bias) v, projected. Vaswani et al. 2017, 3.2; grouped heads: Ainslie et al. 2023.

    x (B,T,D) asks, memory (B,S,D) answers; allowed (B,T,S), True = may attend; bias (B,H,T,S) is ALiBi's or T5's;
    waves turn q and k (rotary); infused (B,T,D) is added to what q and k read, not to what v reads. Queries and keys
    are normed per head before the rotation when `qk_norm`. A forbidden score is set to -inf, so its probability is
    exactly 0.
    """
    H, G = config.n_heads, config.n_kv_heads
    asking, answering = (x, memory) if infused is None else (x + infused, memory + infused)
    q = q_raw = split_heads(linear(weights, "q", asking), H)  # (B, H, T, K)
    k = k_raw = split_heads(linear(weights, "k", answering), G)  # (B, G, S, K)
    v = split_heads(linear(weights, "v", memory), G)  # (B, G, S, U)
    if config.attention.qk_norm is not None:
        q = normalize(config.attention.qk_norm, weights, "q_norm", q)
        k = normalize(config.attention.qk_norm, weights, "k_norm", k)
    if waves is not None:
        assert isinstance(config.position, Rotary)
        q = rotate(config.position, q, *waves)
        k = rotate(config.position, k, *waves)
    scores = config.scale * q @ share_heads(k, H).transpose(0, 1, 3, 2)  # (B, H, T, S)
    if bias is not None:
        scores = scores + bias
    scores = np.where(allowed[:, None], scores, -np.inf)
    pattern = softmax(scores)
    heads = pattern @ share_heads(v, H)  # (B, H, T, U)
    out = linear(weights, "o", join_heads(heads))
    saved = {"asking": asking, "answering": answering, "memory": memory, "q_raw": q_raw, "k_raw": k_raw}
    saved |= {"q": q, "k": k, "v": v}
    return out, saved | {"scores": scores, "pattern": pattern, "heads": heads, "out": out}
