"""Attention: softmax(scale q k^T + bias) v, over the sequence itself or over an encoder's output.

`explicit_attention` is the definition, written out; the fused kernel computes the same. The explicit one runs when a
tap asks for scores or pattern. tests/model/test_attention.py pins them equal.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.cache import KV
from glassformer.model.context import NO_TAP, AttentionContext, Tap
from glassformer.model.layers import build_norm
from glassformer.model.positions import Rotation, apply_rotation
from glassformer.shapes import Float, Shaped


class Attention(nn.Module):
    """H query heads over G key/value heads; query head h uses key/value head h // (H/G)."""

    def __init__(self, cfg: c.ModelConfig):
        super().__init__()
        H, G, K, U, D = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value, cfg.d_model
        self.n_heads, self.n_kv_heads, self.scale, self.dropout = H, G, cfg.scale, cfg.dropout
        self.q = nn.Linear(D, H * K, bias=cfg.attention.bias)
        self.k = nn.Linear(D, G * K, bias=cfg.attention.bias)
        self.v = nn.Linear(D, G * U, bias=cfg.attention.bias)
        self.o = nn.Linear(H * U, D, bias=cfg.out_bias)
        self.q_norm = build_norm(K, cfg.attention.qk_norm) if cfg.attention.qk_norm else None
        self.k_norm = build_norm(K, cfg.attention.qk_norm) if cfg.attention.qk_norm else None
        self.kernel: Callable[..., Tensor] = F.scaled_dot_product_attention
        """The fused implementation of `explicit_attention`; `kernels` may install a faster one."""

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: AttentionContext = AttentionContext(),
        tap: Tap = NO_TAP,
        kv: KV | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Queries of x over its own keys and values and the cached ones, or over `kv`, computed before."""
        placed = x if context.qk_embedding is None else x + context.qk_embedding.to(x.dtype)
        k, v = self.project_kv(x, placed, context.rotation) if kv is None else kv
        if context.cache is not None:
            k, v = context.cache.extend(k, v)
        q = to_heads(self.q(placed), self.n_heads, self.q_norm, context.rotation)
        return self.attend(q, k, v, context, tap)

    def project_kv(
        self, x: Float[Tensor, "B S D"], placed: Float[Tensor, "B S D"] | None = None, rotation: Rotation | None = None
    ) -> KV:
        """Keys (B,G,S,K), normed and rotated, and values (B,G,S,U). Keys are read from `placed`, values from x."""
        k = self.k(x if placed is None else placed)
        return to_heads(k, self.n_kv_heads, self.k_norm, rotation), to_heads(self.v(x), self.n_kv_heads)

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S U"],
        context: AttentionContext,
        tap: Tap,
    ) -> Float[Tensor, "B T D"]:
        """softmax(scale q k^T + bias) v, merged by the output projection. A mask longer than the keys is cropped."""
        q, k, v = tap("q", q), tap("k", k), tap("v", v)
        mask = None if context.mask is None else context.mask[..., -k.shape[2] :]
        dropout = self.dropout if self.training else 0.0
        if tap.wants("scores") or tap.wants("pattern"):
            heads = explicit_attention(q, k, v, self.scale, mask, context.is_causal, dropout, tap)
        else:
            options = {"scale": self.scale, "enable_gqa": self.n_kv_heads != self.n_heads}
            heads = self.kernel(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=context.is_causal, **options)
        return tap("out", self.o(tap("heads", heads).transpose(1, 2).flatten(2)))


def explicit_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    scale: float,
    mask: Shaped[Tensor, "*#m #T S"] | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    tap: Tap = NO_TAP,
) -> Float[Tensor, "B H T U"]:
    """The definition, line by line. The softmax of half-precision scores is computed in float32.

    `mask` is boolean, True = may attend, or a bias that is added to the scores.
    """
    sharing = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(sharing, dim=1), v.repeat_interleave(sharing, dim=1)  # (B, H, S, ·)
    scores = q @ k.transpose(-1, -2) * scale  # (B, H, T, S)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=k.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    scores = tap("scores", scores)
    exact = torch.promote_types(scores.dtype, torch.float32)
    pattern = tap("pattern", scores.softmax(-1, dtype=exact).to(scores.dtype))
    return F.dropout(pattern, dropout) @ v


def to_heads(
    x: Float[Tensor, "B T N"], n_heads: int, norm: nn.Module | None = None, rotation: Rotation | None = None
) -> Float[Tensor, "B H T K"]:
    """Split the last dimension into heads, then apply QK-norm and rotary positions."""
    heads = x.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    heads = heads if norm is None else norm(heads)
    return heads if rotation is None else apply_rotation(heads, rotation)
