"""What a training kernel puts into a model: another class for a module, and attention with joined projections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.model import Model
from glassformer.model.attention import Attention
from glassformer.model.block import Block
from glassformer.model.cache import KV
from glassformer.model.context import NO_TAP, AttentionContext, Tap
from glassformer.shapes import Float


@dataclass(frozen=True)
class Replacement:
    """A module, the subclass of its class whose `forward` calls a kernel, and attributes that the subclass needs.

    Parameters, buffers and their names stay, so checkpoints and optimizers see the same model.
    """

    module: nn.Module
    kind: type[nn.Module]
    attributes: dict[str, Any] = field(default_factory=dict)


class JoinedAttention(Attention):
    """An Attention whose training steps compute queries, keys and values together, by `project`: here as one matmul.

    In evaluation, with a KV cache, with keys and values from elsewhere, or where positions are added to queries and
    keys alone, it is an Attention.
    """

    def project(self, x: Float[Tensor, "B T D"]) -> Sequence[Tensor]:
        """Return queries (B,T,HK), keys (B,T,GK) and values (B,T,GU)."""
        layers = (self.q, self.k, self.v)
        bias = None if self.q.bias is None else torch.cat([layer.bias for layer in layers])
        joined = F.linear(x, torch.cat([layer.weight for layer in layers]), bias)
        return joined.split([len(layer.weight) for layer in layers], -1)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        context: AttentionContext = AttentionContext(),
        tap: Tap = NO_TAP,
        kv: KV | None = None,
    ) -> Float[Tensor, "B T D"]:
        if not self.training or context.cache is not None or context.qk_embedding is not None or kv is not None:
            return Attention.forward(self, x, context, tap, kv)
        q, k, v = self.project(x)
        q = self.prepare(q, self.n_heads, self.q_norm, context.rotation)
        k = self.prepare(k, self.n_kv_heads, self.k_norm, context.rotation)
        return self.attend(q, k, self.prepare(v, self.n_kv_heads), context, tap)


def joined_replacements(model: Model) -> Iterator[Replacement]:
    """Yield the self-attention of all blocks whose three projections all have a bias, or none."""
    for block in (module for module in model.modules() if isinstance(module, Block)):
        attention = block.attention
        if type(attention) is not Attention:
            continue
        if len({layer.bias is None for layer in (attention.q, attention.k, attention.v)}) == 1:
            yield Replacement(attention, JoinedAttention)
