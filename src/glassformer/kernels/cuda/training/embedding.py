"""Embeddings whose weight is the head's, too: their gradient is added to the head's, in place.

Autograd would write zeros for the whole vocabulary, fill in the rows of the tokens of the batch, and add that to the
gradient of the head: six times the bytes of the weight in each step. Here the head leaves its gradient at the weight,
and the backward pass of the embedding, which comes after it, adds the rows of the batch's tokens to it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.replacement import Replacement
from glassformer.model import Model
from glassformer.shapes import Float, Int

SLOT = "gradient_of_head"
"""Attribute of a weight from the embedding's forward to its backward pass: a list, to which the head's gradient is
appended if the head has one."""


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        setattr(weight, SLOT, [])
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (tokens,), slot = ctx.saved_tensors, getattr(ctx.weight, SLOT, [])
        setattr(ctx.weight, SLOT, None)
        rows = gradients[0].reshape(-1, gradients[0].shape[-1])
        if not slot:
            return None, torch.ops.aten.embedding_dense_backward(rows, tokens.flatten(), len(ctx.weight), -1, False)
        add_rows(slot[0], tokens.flatten(), rows)
        return None, slot[0]


def leave(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """Leave the head's gradient to the embedding, and return None; return it if no embedding waits for it."""
    slot = getattr(weight, SLOT, None)
    if slot is None or slot:
        return gradient
    slot.append(gradient)
    return None


def add_rows(total: Float[Tensor, "V D"], tokens: Int[Tensor, " N"], rows: Float[Tensor, "N D"]) -> None:
    """Add rows to those of their tokens. The order of the sums is fixed."""
    ordered, order = tokens.sort(stable=True)
    # rows of equal tokens are added first: group g is that of the g-th smallest token
    group = F.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))
    sums = torch.ops.aten.embedding_dense_backward(rows[order], group, len(group), -1, False)
    # there may be fewer groups than tokens: the others are zero, and are added to the first row
    places = torch.zeros_like(ordered).scatter_(0, group, ordered)
    total.index_add_(0, places, sums.to(total.dtype))


class TiedEmbedding(nn.Embedding):
    """Embeddings of tokens that share their weight with the head."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        if not (self.training and torch.is_grad_enabled() and torch.is_autocast_enabled(weight.device.type)):
            return super().forward(input)
        out: Tensor = _Embed.apply(input, weight)
        return out


def replacements(model: Model) -> Iterator[Replacement]:
    """Yield the embedding of tokens, if its weight is the head's."""
    if model.head is not None and model.head.weight is None and type(model.embed.tokens) is nn.Embedding:
        yield Replacement(model.embed.tokens, TiedEmbedding)
