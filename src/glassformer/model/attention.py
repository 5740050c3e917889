"""Attention: softmax(scale q k^T + bias) v, over the sequence itself or over an encoder's output.

The explicit path is the definition, written out; the fused path is torch's kernel for the same thing. The explicit one
runs when a tap asks to see scores or pattern. tests/model/test_attention.py pins them equal.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.cache import KV, Store
from glassformer.model.masks import View
from glassformer.model.norm import build_norm
from glassformer.model.positions import Rotation, apply_rotation
from glassformer.model.tap import Tap
from glassformer.shapes import Bool, Float, Shaped


class Attention(nn.Module):
    """H query heads over G key/value heads; query head h reads key/value head h // (H/G)."""

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

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        view: View,
        tap: Tap,
        rotation: Rotation | None = None,
        bias: Float[Tensor, "#B H T S"] | None = None,
        store: Store | None = None,
        infusion: Float[Tensor, "#B T D"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Self-attention: new tokens look at themselves and at what `store` remembers.

        Queries and keys read x + infusion, values x alone.
        """
        placed = x if infusion is None else x + infusion
        k, v = self.project_keys(x, rotation, placed)
        if store is not None:
            k, v = store.extend(k, v)
        return self.attend(placed, k, v, view, tap, rotation, bias)

    def project_keys(
        self, x: Float[Tensor, "B S D"], rotation: Rotation | None = None, placed: Float[Tensor, "B S D"] | None = None
    ) -> KV:
        """k (B,G,S,K), normed and rotated, and v (B,G,S,U); keys read `placed` where positions are infused."""
        k = self.k(x if placed is None else placed)
        return place(k, self.n_kv_heads, self.k_norm, rotation), split(self.v(x), self.n_kv_heads)

    def attend(
        self,
        x: Float[Tensor, "B T D"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S U"],
        view: View,
        tap: Tap,
        rotation: Rotation | None = None,
        bias: Float[Tensor, "#B H T S2"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Queries of x over given keys and values. A mask or bias wider than the keys loses its oldest columns."""
        return self.look(place(self.q(x), self.n_heads, self.q_norm, rotation), k, v, view, tap, bias)

    def look(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S U"],
        view: View,
        tap: Tap,
        bias: Float[Tensor, "#B H T S2"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Everything after the projections of queries, keys and values."""
        q, k, v = tap("q", q), tap("k", k), tap("v", v)
        S = k.shape[2]
        mask = None if view.mask is None else view.mask[..., -S:]
        bias = None if bias is None else bias[..., -S:]
        if view.is_causal and (bias is not None or tap.wants("scores") or tap.wants("pattern")):
            mask = torch.ones(S, S, dtype=torch.bool, device=k.device).tril()
        dropout = self.dropout if self.training else 0.0
        if tap.wants("scores") or tap.wants("pattern"):
            heads = explicit_attention(q, k, v, self.scale, mask, bias, tap, dropout)
        else:
            if bias is not None and mask is not None:
                bias = bias.masked_fill(~mask, float("-inf"))
            heads = self.kernel(q, k, v, mask if bias is None else bias, view.is_causal and mask is None, dropout)
        heads = tap("heads", heads)
        return tap("out", self.o(heads.transpose(1, 2).flatten(2)))

    def kernel(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S U"],
        mask: Shaped[Tensor, "*#m #T S"] | None,
        is_causal: bool,
        dropout: float,
    ) -> Float[Tensor, "B H T U"]:
        """The fused path: torch's, or what a subclass has instead. `mask` is boolean, or a bias with -inf."""
        shared = self.n_kv_heads != self.n_heads
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=self.scale, enable_gqa=shared
        )


def explicit_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    scale: float,
    mask: Bool[Tensor, "*#m T S"] | None,
    bias: Float[Tensor, "#B H T S"] | None,
    tap: Tap,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T U"]:
    """The definition, line by line. Softmax of half-precision scores is taken in float32."""
    sharing = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(sharing, dim=1), v.repeat_interleave(sharing, dim=1)  # (B, H, S, ·)
    scores = q @ k.transpose(-1, -2) * scale  # (B, H, T, S)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    scores = tap("scores", scores)
    exact = torch.promote_types(scores.dtype, torch.float32)
    pattern = tap("pattern", scores.softmax(-1, dtype=exact).to(scores.dtype))
    return F.dropout(pattern, dropout) @ v


def split(x: Float[Tensor, "B T N"], heads: int) -> Float[Tensor, "B H T K"]:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def place(
    x: Float[Tensor, "B T N"], heads: int, norm: nn.Module | None, rotation: Rotation | None
) -> Float[Tensor, "B H T K"]:
    """Projected queries or keys by heads, normed and rotated."""
    x = split(x, heads) if norm is None else norm(split(x, heads))
    return x if rotation is None else apply_rotation(x, rotation)
