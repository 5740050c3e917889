"""Multi-head latent attention: keys and values of all heads from one low-rank vector of each token.

A key is [shared ; own_h(c)] and a value v_h(c), with c the normed low-rank vector and `shared` the rotated components
that all heads share. The KV cache holds `shared` as its key and c as its value, one head each.

Few new tokens over a long cache are computed in the absorbed form: q_own . own_h(c) = (own_h^T q_own) . c, so the keys
are [shared ; c] and the values c, with one key/value head, and v_h is applied to the result. DeepSeek-AI 2024, 2.1.
"""

import torch
from torch import Tensor, nn

from glassformer import config as c
from glassformer.model.attention import Attention, to_heads
from glassformer.model.cache import KV
from glassformer.model.context import NO_TAP, AttentionContext, Tap
from glassformer.model.layers import build_norm
from glassformer.model.positions import Rotation
from glassformer.shapes import Float


class LatentAttention(Attention):
    """H heads whose keys and values are computed from one vector of each token."""

    def __init__(self, cfg: c.ModelConfig, latent: c.Latent):
        super().__init__(cfg)
        H, K, U, D = cfg.n_heads, cfg.d_head, cfg.d_value, cfg.d_model
        bias, rank = cfg.attention.bias, latent.kv_rank
        self.d_shared = latent.d_shared
        # per key and head, the absorbed form costs 2C + R - K - U more for each query and saves C (K - R + U) in all
        self.absorbs_below = rank * (K - self.d_shared + U) / max(2 * rank + self.d_shared - K - U, 1)
        self.q_down = nn.Linear(D, latent.q_rank, bias=bias) if latent.q_rank else None
        self.q_down_norm = build_norm(latent.q_rank, latent.norm) if latent.q_rank else None
        self.q = nn.Linear(latent.q_rank or D, H * K, bias=False)
        self.kv_down = nn.Linear(D, rank, bias=bias)
        self.kv_down_norm = build_norm(rank, latent.norm)
        self.k_shared = nn.Linear(D, latent.d_shared, bias=bias)
        self.k = nn.Linear(rank, H * (K - latent.d_shared), bias=False)
        self.v = nn.Linear(rank, H * U, bias=False)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: AttentionContext = AttentionContext(),
        tap: Tap = NO_TAP,
        kv: KV | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Queries of x over its own keys and values and the cached ones, or over `kv`, computed before."""
        shared, latent = self.project_kv(x, None, context.rotation) if kv is None else kv
        if context.cache is not None:
            shared, latent = context.cache.extend(shared, latent)
        low = x if self.q_down is None or self.q_down_norm is None else self.q_down_norm(self.q_down(x))
        q = self.prepare(self.q(low), self.n_heads, None, context.rotation)
        if tap is NO_TAP and q.shape[2] < min(self.absorbs_below, latent.shape[2]):
            q, keys, values = self.absorb(q, shared, latent)
            return self.attend(q, keys, values, context, tap, self.v.weight.unflatten(0, (self.n_heads, -1)))
        return self.attend(q, *self.expand(shared, latent), context, tap)

    def project_kv(
        self, x: Float[Tensor, "B S D"], placed: Float[Tensor, "B S D"] | None = None, rotation: Rotation | None = None
    ) -> KV:
        """The rotated shared components of the keys (B,1,S,R) and the low-rank vectors (B,1,S,C)."""
        return self.prepare(self.k_shared(x), 1, None, rotation), self.kv_down_norm(self.kv_down(x))[:, None]

    def expand(
        self, shared: Float[Tensor, "B 1 S R"], latent: Float[Tensor, "B 1 S C"]
    ) -> tuple[Float[Tensor, "B H S K"], Float[Tensor, "B H S U"]]:
        """Keys and values of every head."""
        own, v = to_heads(self.k(latent[:, 0]), self.n_heads), to_heads(self.v(latent[:, 0]), self.n_heads)
        return torch.cat([shared.expand(-1, self.n_heads, -1, -1), own], dim=-1), v

    def absorb(
        self, q: Float[Tensor, "B H T K"], shared: Float[Tensor, "B 1 S R"], latent: Float[Tensor, "B 1 S C"]
    ) -> tuple[Float[Tensor, "B H T X"], Float[Tensor, "B 1 S X"], Float[Tensor, "B 1 S C"]]:
        """Queries, keys and values of the absorbed form: see the module docstring."""
        own = self.k.weight.unflatten(0, (self.n_heads, -1))  # (H, K - R, C)
        absorbed = torch.cat([q[..., : self.d_shared], q[..., self.d_shared :] @ own], dim=-1)
        return absorbed, torch.cat([shared, latent], dim=-1), latent
