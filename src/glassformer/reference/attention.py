"""Multi-head attention: each query position takes a mean of the values, weighted by query-key similarity.

One function computes self-attention (memory is x) and cross-attention (memory is the output of the encoder). H query
heads share G key/value heads: G = H is multi-head attention, G = 1 is multi-query, and anything between is
grouped-query.
"""

import numpy as np

from glassformer.config import Latent, ModelConfig, Rotary
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
    rotary: Rotary | None = None,
) -> tuple[Array, Saved]:
    """Compute one attention layer: (B,T,D) -> (B,T,D).

        pattern = softmax(scale * q k^T + bias),   out = (pattern v) W_o^T + b_o

    With `softcap` c the scores are c tanh(scale * q k^T / c) + bias. With `sinks` the softmax has one more score b_h:
    pattern_j = exp(s_j) / (exp(b_h) + sum_k exp(s_k)), so that a pattern may sum to less than 1.

    Args:
        x: (B,T,D), the input of the queries.
        memory: (B,S,D), the input of the keys and values.
        allowed: (B,T,S), True = may attend. A masked score is set to -inf, so its probability is exactly 0.
        bias: (B,H,T,S), added to the scores (ALiBi, T5).
        cos_sin: rotates q and k (rotary positions).
        rotary: the rotary positions of this layer. Default: those of the model.
        qk_position: (B,T,D), the query/key position embedding. It is added to the input of q and k, not of v.

    With `qk_norm`, queries and keys are normalized: per head or over the whole projection, before or after the
    rotation. With `clip` c, q, k and v are limited to [-c, c] before the rotation.

    Vaswani et al. 2017, section 3.2; grouped-query attention: Ainslie et al. 2023.
    """
    H, G = config.n_heads, config.n_kv_heads
    q_input, k_input = (x, memory) if qk_position is None else (x + qk_position, memory + qk_position)
    rotary = config.position if rotary is None and isinstance(config.position, Rotary) else rotary
    rotation = None if cos_sin is None or rotary is None else (rotary, *cos_sin)
    if config.attention.latent is not None:
        q, k, v, saved = latent_heads(config, config.attention.latent, weights, x, memory, rotation)
    else:
        q, saved_q = prepare(config, weights, "q", split_heads(linear(weights, "q", q_input), H), rotation)
        k, saved_k = prepare(config, weights, "k", split_heads(linear(weights, "k", k_input), G), rotation)
        v_raw = split_heads(linear(weights, "v", memory), G)  # (B, G, S, U)
        v, saved = clip(config, v_raw), saved_q | saved_k | {"v_raw": v_raw}
    capped = soft_cap(config.attention.softcap, config.scale * q @ repeat_kv_heads(k, H).transpose(0, 1, 3, 2))
    scores = np.where(allowed[:, None], capped if bias is None else capped + bias, -np.inf)  # (B, H, T, S)
    pattern = softmax_with_sinks(scores, weights["sinks"]) if config.attention.sinks else softmax(scores)
    heads = pattern @ repeat_kv_heads(v, H)  # (B, H, T, U)
    out = linear(weights, "o", join_heads(heads))
    saved |= {"q_input": q_input, "k_input": k_input, "memory": memory, "capped": capped, "q": q, "k": k, "v": v}
    return out, saved | {"scores": scores, "pattern": pattern, "heads": heads, "out": out}


def latent_heads(
    config: ModelConfig,
    latent: Latent,
    weights: Params,
    x: Array,
    memory: Array,
    rotation: tuple[Rotary, Array, Array] | None,
) -> tuple[Array, Array, Array, Saved]:
    """Return q (B,H,T,K), k (B,H,S,K) and v (B,H,S,U) of multi-head latent attention. DeepSeek-AI 2024, section 2.1.

    c = norm(kv_down(memory)),   k_h = [shared ; k_h(c)],   v_h = v_h(c),   shared = rotate(k_shared(memory))
    q = q(x), or q(norm(q_down(x))) with `q_rank`; the components that meet `shared` are rotated
    """
    H = config.n_heads
    saved: Saved = {"q_low": x}
    if latent.q_rank is not None:
        saved["q_down"] = linear(weights, "q_down", x)
        saved["q_low"] = normalize(latent.norm, weights, "q_down_norm", saved["q_down"])
    q = split_heads(linear(weights, "q", saved["q_low"]), H)
    shared = split_heads(linear(weights, "k_shared", memory), 1)  # (B, 1, S, R)
    if rotation is not None:
        q, shared = rotate(rotation[0], q, *rotation[1:]), rotate(rotation[0], shared, *rotation[1:])
    saved["kv_down"] = linear(weights, "kv_down", memory)
    saved["kv_low"] = normalize(latent.norm, weights, "kv_down_norm", saved["kv_down"])
    own, v = (
        split_heads(linear(weights, "k", saved["kv_low"]), H),
        split_heads(linear(weights, "v", saved["kv_low"]), H),
    )
    return q, np.concatenate([np.repeat(shared, H, axis=1), own], axis=-1), v, saved


def prepare(
    config: ModelConfig, weights: Params, name: str, x: Array, rotation: tuple[Rotary, Array, Array] | None
) -> tuple[Array, Saved]:
    """Norm, clip and rotate queries or keys (B,heads,T,K). `name` is `q` or `k`."""
    norm, over, last = config.attention.qk_norm, config.attention.qk_norm_over, config.attention.qk_norm_after_rotation
    saved = {f"{name}_raw": x}
    if norm is not None and not last:
        joined = join_heads(x) if over == "all" else x
        x = normalize(norm, weights, f"{name}_norm", joined)
        x = split_heads(x, saved[f"{name}_raw"].shape[1]) if over == "all" else x
    saved[f"{name}_unclipped"] = x
    x = clip(config, x)
    if rotation is not None:
        x = rotate(rotation[0], x, *rotation[1:])
    saved[f"{name}_rotated"] = x
    if norm is not None and last:
        x = normalize(norm, weights, f"{name}_norm", x)
    return x, saved


def clip(config: ModelConfig, x: Array) -> Array:
    """Limit all components to [-clip, clip], if the config has a limit."""
    limit = config.attention.clip
    return x if limit is None else np.clip(x, -limit, limit)


def soft_cap(cap: float | None, x: Array) -> Array:
    """Return c tanh(x / c), which stays within (-c, c) and is close to x if x is small; x itself without a cap."""
    return x if cap is None else cap * np.tanh(x / cap)


def softmax_with_sinks(scores: Array, sinks: Array) -> Array:
    """Softmax over the keys and one more score per head (H,); its probability is dropped. (B,H,T,S) -> (B,H,T,S)."""
    sink = np.broadcast_to(sinks[None, :, None, None], (*scores.shape[:3], 1))
    return softmax(np.concatenate([scores, sink], axis=-1))[..., :-1]
