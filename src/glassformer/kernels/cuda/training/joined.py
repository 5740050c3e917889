"""Self-attention whose training step projects queries, keys and values by one product.

Their weights are put one below the other at each step, and a compiler does so as it casts them. Three products of a
small model leave most of a GPU idle; one of three times the size does not. Parameters and their names stay.
"""

import torch
from torch import Tensor

from glassformer.kernels.cuda.training import causal
from glassformer.kernels.cuda.training.products import cast_to_bfloat16, linear
from glassformer.model import Model
from glassformer.model.attention import Attention, place, split
from glassformer.model.block import Block
from glassformer.model.cache import Store
from glassformer.model.masks import View
from glassformer.model.positions import Rotation
from glassformer.model.tap import Tap
from glassformer.shapes import Float

SITES = ("q", "k", "v", "scores", "pattern", "heads")


class JoinedAttention(Attention):
    """Evaluated, decoding or with infused positions, which values do not read, it is an Attention."""

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
        if not self.training or store is not None or infusion is not None:
            return Attention.forward(self, x, view, tap, rotation, bias, store, infusion)
        if rotation is None and self.by_kernel(x, view, tap, bias):
            heads = causal.attend(self.products(x), self.n_heads, self.scale)
            return tap("out", self.o(heads))
        q, k, v = self.project(x)
        q, k = place(q, self.n_heads, self.q_norm, rotation), place(k, self.n_kv_heads, self.k_norm, rotation)
        return self.look(q, k, split(v, self.n_kv_heads), view, tap, bias)

    def products(self, x: Float[Tensor, "B T D"]) -> list[Tensor]:
        """Queries, keys and values as they are made: side by side in one tensor, or in three."""
        layers = (self.q, self.k, self.v)
        weight = torch.cat([layer.weight for layer in layers])
        bias = None if self.q.bias is None else torch.cat([layer.bias for layer in layers])
        return [linear(x, weight, bias)]

    def project(self, x: Float[Tensor, "B T D"]) -> tuple[Tensor, ...]:
        """Queries, keys and values."""
        made = self.products(x)
        sizes = [len(layer.weight) for layer in (self.q, self.k, self.v)]
        return tuple(made) if len(made) == 3 else made[0].split(sizes, -1)

    def by_kernel(self, x: Float[Tensor, "B T D"], view: View, tap: Tap, bias: Tensor | None) -> bool:
        """Whether heads are made of products alone, by causal.py; not where somebody looks at them."""
        plain = view.is_causal and view.mask is None and bias is None and self.q_norm is None and not self.dropout
        alike = self.q.weight.shape == self.k.weight.shape == self.v.weight.shape
        if not (plain and alike and cast_to_bfloat16(x)) or any(tap.wants(site) for site in SITES):
            return False
        width = len(self.q.weight) // self.n_heads
        return causal.suits(x.shape[0], x.shape[1], self.n_heads, width, x.device)


def enable(model: Model) -> None:
    """Let the self-attention of a model's blocks train so."""
    for block in (m for m in model.modules() if isinstance(m, Block)):
        if type(block.attention) is Attention:
            block.attention.__class__ = JoinedAttention
