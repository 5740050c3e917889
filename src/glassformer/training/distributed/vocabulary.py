"""Vocabulary parallelism: each of T ranks has the rows of some token ids, of the embedding and of the head.

No rank ever holds the logits of all ids, nor the whole embedding. With z the logits of one token and y its target:

    embedding   a rank looks up its own ids, and gives 0 for others; the sum over ranks is the embedding
    loss        lse - z_y with lse = log sum exp z. Each rank contributes its largest logit, its sum of exponentials,
                z_y if it has y, and the sum of its logits (for label smoothing): two small all-reduces for each token
    gradient    each rank computes that of its own logits, with the formula of `chunked_loss`

The loss runs in chunks where a single process does so as well. Where something else than the loss needs logits
(preferences, measurements), they are gathered.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.model import Model
from glassformer.model.layers import Head
from glassformer.sizing.step import PLAIN_LOGIT
from glassformer.training.chunked_loss import chunk_gradients, chunk_rows, head_gradients, linear_cross_entropy
from glassformer.training.data.batches import IGNORED
from glassformer.training.distributed.exchange import Ranks
from glassformer.training.objective import chunked
from glassformer.training.run import Loss

Settings = tuple[int, float, float]
"""Ignored target id, label smoothing, weight of the z-loss."""


class Vocabulary:
    """The token ids of one rank, first to last - 1, of `whole` in all."""

    def __init__(self, ranks: Ranks, whole: int):
        self.ranks, self.whole = ranks, whole
        self.first, self.last = ranks.bounds(whole)

    def divide(self, model: Model) -> None:
        """Let embedding and head, whose parameters are parts already, compute with them."""
        tokens: Any = model.embed.tokens
        tokens.forward = lambda ids: self.embed(tokens, ids)
        head: Any = model.head
        if head is None:
            return

        def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self.ranks.copy(given[0]), *given[1:])

        def after(_: nn.Module, __: Any, logits: Tensor) -> Tensor:
            return self.ranks.join(logits, logits.dim() - 1, self.whole)

        head.register_forward_pre_hook(before)
        head.register_forward_hook(after)
        head.parallel_loss = self.loss  # `summed_loss` calls it

    def embed(self, tokens: nn.Embedding, ids: Tensor) -> Tensor:
        """Return the sum over ranks of the vectors that each of them has."""
        mine = (ids >= self.first) & (ids < self.last)
        vectors = F.embedding(torch.where(mine, ids - self.first, 0), tokens.weight)
        return self.ranks.add(torch.where(mine[..., None], vectors, 0.0))

    def loss(self, model: Model, hidden: Tensor, targets: Tensor, loss: Loss, training: bool) -> tuple[Tensor, Tensor]:
        """Return (what is minimised, plain cross-entropy), summed over targets, as `summed_loss` does."""
        head: Any = model.head
        settings = (IGNORED, loss.label_smoothing, loss.z_loss) if training else (IGNORED, 0.0, 0.0)
        hidden = self.ranks.copy(hidden)
        if not chunked(model):
            # calls the forward of the head itself: its hooks would gather the logits
            logits = Head.forward(head, hidden, model.embed.tokens.weight).flatten(0, 1)
            out: tuple[Tensor, Tensor] = _LogitsLoss.apply(logits, targets, settings, self)
            return out
        weight = model.embed.tokens.weight if head.weight is None else head.weight
        rows = hidden.flatten(0, 1) * head.scale if head.scale != 1 else hidden.flatten(0, 1)
        if not training:
            plain = self.plain_loss(rows, weight, head.bias, targets)
            return plain, plain
        gradients = functools.partial(head_gradients, gradients=self.gradients)  # that of the states is a part of it
        return linear_cross_entropy(rows, weight, targets, head.bias, *settings, gradients=gradients)

    def statistics(
        self, z: Tensor, targets: Tensor, ignored: int, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return of each token: lse, the target's logit and the mean logit over all ranks; and which logit is its own.

        The last is the column of the target among the logits z (N, own ids) of this rank, and -1 if another has it.
        """
        column = torch.where((targets != ignored) & (targets >= self.first), targets - self.first, -1)
        column = torch.where(column < z.shape[1], column, -1)
        top = self.ranks.all_reduce(z.amax(-1), largest=True)
        picked = torch.where(column >= 0, z.gather(1, column.clamp(min=0)[:, None])[:, 0], 0.0)
        sums = self.ranks.all_reduce(torch.stack([(z - top[:, None]).exp().sum(-1), picked, z.sum(-1)]))
        return top + sums[0].log(), sums[1], sums[2] / self.whole, column

    def gradients(
        self, logits: Tensor, targets: Tensor, ignored: int, smoothing: float, z_loss: float, columns: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `chunk_gradients` does, for the logits of this rank."""
        settings = ignored, smoothing, z_loss, columns
        return chunk_gradients(logits, targets, *settings, statistics=self.statistics, classes=self.whole)

    def plain_loss(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy, chunk by chunk, without gradients."""
        total, rows = torch.zeros((), device=hidden.device), chunk_rows(len(weight), PLAIN_LOGIT)
        for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
            lse, picked, *_ = self.statistics(F.linear(part, weight, bias).float(), wanted, IGNORED)
            total = total + torch.where(wanted != IGNORED, lse - picked, 0.0).sum()
        return total


class _LogitsLoss(torch.autograd.Function):
    """(total, plain) of logits (N, own ids); only `total` has a gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, settings: Settings, ids: Vocabulary) -> Any:
        total, plain, gradient = ids.gradients(logits, targets, *settings)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(plain)
        return total, plain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None
