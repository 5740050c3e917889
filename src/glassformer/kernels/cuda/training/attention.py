"""Self-attention whose training step computes queries, keys and values by one matmul.

The three weights are concatenated in each step; torch.compile does so where it casts them. Three matmuls of a small
model leave most of a GPU idle, one of three times the size does not. Parameters and their names do not change.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import causal
from glassformer.kernels.cuda.training.matmuls import cast_to_bfloat16, linear
from glassformer.kernels.replacement import Replacement
from glassformer.model import Model
from glassformer.model.attention import Attention, to_heads
from glassformer.model.block import Block
from glassformer.model.cache import KV
from glassformer.model.context import NO_TAP, AttentionContext, Tap
from glassformer.shapes import Float

SITES = ("q", "k", "v", "scores", "pattern", "heads")
"""Values inside attention that the causal kernel does not produce."""


class JoinedAttention(Attention):
    """An Attention with one matmul for queries, keys and values in training steps.

    In evaluation, with a KV cache, or where positions are added to queries and keys alone, it is an Attention.
    """

    causal_kernel: bool = False
    """True if heads may be computed by causal.py."""

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: AttentionContext = AttentionContext(),
        tap: Tap = NO_TAP,
        kv: KV | None = None,
    ) -> Float[Tensor, "B T D"]:
        if not self.training or context.cache is not None or context.qk_embedding is not None or kv is not None:
            return Attention.forward(self, x, context, tap, kv)
        if self.causal_kernel and self.supports_call(x, context, tap):
            heads = causal.attend(self.joined_projections(x), self.n_heads, self.scale)
            return tap("out", self.o(heads))
        q, k, v = self.project(x)
        q = to_heads(q, self.n_heads, self.q_norm, context.rotation)
        k = to_heads(k, self.n_kv_heads, self.k_norm, context.rotation)
        return self.attend(q, k, to_heads(v, self.n_kv_heads), context, tap)

    def joined_projections(self, x: Float[Tensor, "B T D"]) -> list[Tensor]:
        """Return queries, keys and values concatenated in one tensor. A subclass may return three."""
        layers = (self.q, self.k, self.v)
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if self.q.bias is None else torch.cat([layer.bias for layer in layers])
        return [linear(x, weight, bias)]

    def project(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        joined = self.joined_projections(x)
        sizes = [len(layer.weight) for layer in (self.q, self.k, self.v)]
        return tuple(joined) if len(joined) == 3 else joined[0].split(sizes, -1)

    def supports_call(self, x: Float[Tensor, "B T D"], context: AttentionContext, tap: Tap) -> bool:
        """Return whether causal.py computes the heads of this call. It does not where a tap reads their inside."""
        plain = context.is_causal and context.rotation is None and self.q_norm is None and not self.dropout
        alike = self.q.weight.shape == self.k.weight.shape == self.v.weight.shape
        if not (plain and alike and cast_to_bfloat16(x)) or any(tap.wants(site) for site in SITES):
            return False
        width = len(self.q.weight) // self.n_heads
        return causal.supports_call(x.shape[0], x.shape[1], self.n_heads, width, x.device)


def replacements(model: Model) -> Iterator[Replacement]:
    """Yield the self-attention of every block."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        if type(block.attention) is Attention:
            yield Replacement(block.attention, JoinedAttention)


def causal_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the self-attention that already computes its projections by one matmul, to use the causal kernel."""
    for module in model.modules():
        if isinstance(module, JoinedAttention):
            yield Replacement(module, type(module), {"causal_kernel": True})
