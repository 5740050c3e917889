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
        self.q_norm, self.k_norm = _build_qk_norm(cfg, H), _build_qk_norm(cfg, G)
        self.norms_all = cfg.attention.qk_norm_over == "all"
        self.norms_last, self.clip = cfg.attention.qk_norm_after_rotation, cfg.attention.clip
        self.softcap = cfg.attention.softcap
        self.sinks = nn.Parameter(torch.empty(H)) if cfg.attention.sinks else None
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
        q = self.prepare(self.q(placed), self.n_heads, self.q_norm, context.rotation)
        return self.attend(q, k, v, context, tap)

    def project_kv(
        self, x: Float[Tensor, "B S D"], placed: Float[Tensor, "B S D"] | None = None, rotation: Rotation | None = None
    ) -> KV:
        """Keys (B,G,S,K), normed and rotated, and values (B,G,S,U). Keys are read from `placed`, values from x."""
        k = self.k(x if placed is None else placed)
        return self.prepare(k, self.n_kv_heads, self.k_norm, rotation), self.prepare(self.v(x), self.n_kv_heads)

    def prepare(
        self, x: Float[Tensor, "B T N"], n_heads: int, norm: nn.Module | None = None, rotation: Rotation | None = None
    ) -> Float[Tensor, "B H T K"]:
        """Split a projection into heads; norm, clip and rotate it as the config says."""
        if norm is not None and self.norms_all:
            x, norm = norm(x), None
        last = norm if self.norms_last else None
        heads = to_heads(x, n_heads, None if self.norms_last else norm)
        heads = heads if self.clip is None else heads.clamp(-self.clip, self.clip)
        heads = heads if rotation is None else apply_rotation(heads, rotation)
        return heads if last is None else last(heads)

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        v: Float[Tensor, "B G S U"],
        context: AttentionContext,
        tap: Tap,
        after: Float[Tensor, "H X U"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """softmax(scale q k^T + bias) v, merged by the output projection. A mask longer than the keys is cropped.

        `after` is a matrix of each head that is applied to its result (see latent.py).
        """
        q, k, v = tap("q", q), tap("k", k), tap("v", v)
        mask = None if context.mask is None else context.mask[..., -k.shape[2] :]
        dropout = self.dropout if self.training else 0.0
        if self.softcap is not None or self.sinks is not None:
            heads = explicit_attention(
                q, k, v, self.scale, mask, context.is_causal, dropout, tap, self.softcap, self.sinks
            )
        elif tap.wants("scores") or tap.wants("pattern"):
            heads = explicit_attention(q, k, v, self.scale, mask, context.is_causal, dropout, tap)
        else:
            options = {"scale": self.scale, "dropout_p": dropout, "is_causal": context.is_causal}
            if k.shape[1] == q.shape[2] == 1 and k.shape[3] != v.shape[3]:
                # heads that share their keys, as queries: for such widths torch would copy the keys for each head
                mask = mask if mask is None or mask.dim() < 3 else mask.transpose(-3, -2)
                heads = self.kernel(q.transpose(1, 2), k, v, attn_mask=mask, **options).transpose(1, 2)
            else:
                heads = self.kernel(q, k, v, attn_mask=mask, enable_gqa=k.shape[1] != q.shape[1], **options)
        heads = heads if after is None else heads @ after.transpose(-1, -2)
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
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> Float[Tensor, "B H T U"]:
    """The definition, line by line. The softmax of half-precision scores is computed in float32.

    `mask` is boolean, True = may attend, or a bias that is added to the scores. `sinks` holds one more score per head,
    which takes its share of the softmax and adds no value.
    """
    sharing = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(sharing, dim=1), v.repeat_interleave(sharing, dim=1)  # (B, H, S, ·)
    scores = q @ k.transpose(-1, -2) * scale  # (B, H, T, S)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=k.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    scores = tap("scores", scores)
    exact = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        pattern = scores.softmax(-1, dtype=exact)
    else:
        with_sink = torch.cat([scores, sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:3], 1)], dim=-1)
        pattern = with_sink.softmax(-1, dtype=exact)[..., :-1]
    pattern = tap("pattern", pattern.to(scores.dtype))
    return F.dropout(pattern, dropout) @ v


def _build_qk_norm(cfg: c.ModelConfig, n_heads: int) -> nn.Module | None:
    """Build the norm of queries or of keys; None if the config has none."""
    norm, over = cfg.attention.qk_norm, cfg.attention.qk_norm_over
    if norm is None:
        return None
    if over == "all":
        return build_norm(n_heads * cfg.d_head, norm)
    return build_norm(cfg.d_head, norm, n_heads if over == "heads" else 0)


def to_heads(
    x: Float[Tensor, "B T N"], n_heads: int, norm: nn.Module | None = None, rotation: Rotation | None = None
) -> Float[Tensor, "B H T K"]:
    """Split the last dimension into heads, then apply QK-norm and rotary positions."""
    heads = x.unflatten(-1, (n_heads, -1)).transpose(1, 2)
    heads = heads if norm is None else norm(heads)
    return heads if rotation is None else apply_rotation(heads, rotation)
