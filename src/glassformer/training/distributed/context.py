"""Context parallelism: N ranks divide each sequence, for contexts whose activations do not fit on one device.

A sequence is cut into 2N chunks, and rank r computes chunks r and 2N - 1 - r: under a causal mask early chunks attend
to few keys and late ones to many, so each rank has the same work. Embedding, norms, feed-forwards, head and loss work
on a rank's own positions. Attention gathers the keys and values of all ranks (one all-gather, and a reduce-scatter in
the backward pass) and computes the rank's queries over them. Gathered keys and values are the only tensors of the whole
sequence; grouped heads keep them small.

Causality, windows and documents go by the index of a token in the whole sequence, and so do positions. It is applied
from outside: the batch is cut before the model is called, blocks get the masks of their queries over all keys, and
attention gathers. A causal layer without window and documents needs no mask: each of the two chunks attends to the keys
up to its own end, aligned at the last one.

The ranks of one sequence are among those over which FSDP shards, so weights and gradients need nothing new.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from glassformer.config import ConfigError
from glassformer.config.placement import sequence_not_supported
from glassformer.model import Model, masks
from glassformer.model.attention import Attention
from glassformer.model.block import Block, Stack
from glassformer.model.context import AttentionContext
from glassformer.training.data.batches import IGNORED
from glassformer.training.distributed.exchange import Ranks, exchange
from glassformer.training.objective import Batch, document_positions
from glassformer.training.run import Run


def check_context(run: Run) -> None:
    """Refuse a run whose sequences cannot be divided among machine.context ranks."""
    size, unit = run.machine.context, 2 * run.machine.context
    if run.context % unit:
        near = max(run.context // unit, 1) * unit
        raise ConfigError(
            f"loop.context={run.context} is not a multiple of 2 x machine.context={size}: each rank takes two chunks. "
            f"Use {near} or {near + unit}."
        )
    problem = sequence_not_supported(run.model)
    if run.lora is not None:
        problem = "adapters ([lora])"
    if run.chat is not None and run.chat.loss == "dpo":
        problem = "chat.loss='dpo'"
    if problem is not None:
        raise ConfigError(f"machine.context={size} does not support {problem}: use machine.context=1.")


@dataclasses.dataclass(frozen=True)
class DividedContext(AttentionContext):
    """The context of a layer whose queries are this rank's, and whose keys are those of all ranks."""


@dataclasses.dataclass
class Sequences:
    """The whole sequences of a forward pass, of which this rank computes some positions."""

    index: Tensor
    """(T,) the indices of this rank's tokens."""
    length: int
    """Tokens of a whole sequence, with those that fill it up to a multiple of the chunks."""
    real: int
    """Tokens without those."""
    documents: Tensor | None
    """(B, length) the document of each token, if several share a sequence."""
    made: dict[tuple[bool, int | None], Tensor] = dataclasses.field(default_factory=dict)
    """Masks by (causal, window): layers share them."""

    def mask(self, is_causal: bool, window: int | None) -> Tensor:
        """Return (B or 1, 1, T, length): which keys of all ranks each query of this rank attends to."""
        if (is_causal, window) not in self.made:
            keys = torch.arange(self.length, device=self.index.device)
            near = (keys < self.real)[None, :].expand(len(self.index), -1)
            if is_causal:
                near = near & masks.causal(self.index, keys)
            if window is not None:
                near = near & masks.window(self.index, keys, window)
            near = near[None]
            if self.documents is not None:
                near = near & (self.documents[:, self.index, None] == self.documents[:, None, :])
            itself = keys[None, :] == self.index[:, None]  # a token that fills up attends to itself
            self.made[is_causal, window] = (near | itself)[:, None]
        return self.made[is_causal, window]


class ContextParallel:
    """Divides sequences among ranks: cuts the batch, gives blocks their masks, and gathers keys and values."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.present: Sequences | None = None
        """None outside of a forward pass of divided sequences: whole ones are then computed as usual."""

    def install(self, model: Model) -> None:
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            for block in (module for module in stack.modules() if isinstance(module, Block)):
                block.register_forward_pre_hook(functools.partial(self._give_masks, stack))
                attention: Any = block.attention
                attention.attend = functools.partial(self._attend, attention.attend)
                attention.kernel = functools.partial(self._kernel, attention.kernel)

    def parted(self, function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return a function that computes `summed_loss` of whole sequences, each rank a part of it.

        Gradients are averaged over all ranks, so the part of the total is multiplied by their number.
        """

        def call(model: Model, batch: Batch, *given: Any) -> tuple[Tensor, Tensor]:
            part, self.present = self.split(batch)
            try:
                total, plain = function(model, part, *given)
            finally:
                self.present = None
            return total * self.ranks.size, self.ranks.all_reduce(plain.detach().clone())

        return call

    def split(self, batch: Batch) -> tuple[Batch, Sequences]:
        """Return this rank's tokens of a batch, and what it must know of the others."""
        n, rank, real = self.ranks.size, self.ranks.rank, batch.inputs.shape[1]
        chunk = -(-real // (2 * n))
        length = 2 * n * chunk
        more = length - real
        device = batch.inputs.device
        index = torch.cat([torch.arange(c * chunk, (c + 1) * chunk, device=device) for c in (rank, 2 * n - 1 - rank)])
        documents, positions = batch.documents, torch.arange(real, device=device).expand_as(batch.inputs)
        if documents is not None:
            positions = document_positions(documents)
            documents = F.pad(documents, (0, more), value=-1)
        part = Batch(
            F.pad(batch.inputs, (0, more))[:, index],
            F.pad(batch.targets, (0, more), value=IGNORED)[:, index],
            positions=F.pad(positions, (0, more))[:, index],
        )
        return part, Sequences(index, length, real, documents)

    def _give_masks(self, stack: Stack, block: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.present is None:
            return given
        x, context, layer, *rest = given
        known, attention = self.present, block.attention
        assert isinstance(attention, Attention)
        window = stack.windows[layer]
        window = None if window is None or window >= known.length else window
        # explicit attention needs an explicit mask; so does everything but the plain triangle
        written_out = attention.softcap is not None or attention.sinks is not None
        filled = known.real < known.length and not stack.causal
        needed = window is not None or known.documents is not None or filled or (written_out and stack.causal)
        mask = known.mask(stack.causal, window) if needed else None
        own = context.layers[layer]
        layers = list(context.layers)
        layers[layer] = DividedContext(mask, stack.causal and mask is None, own.rotation, own.qk_embedding)
        return (x, dataclasses.replace(context, layers=layers), layer, *rest)

    def _attend(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, *rest: Any
    ) -> Tensor:
        if isinstance(context, DividedContext):
            both = functools.partial(gather_keys, self.ranks), functools.partial(scatter_keys, self.ranks)
            k, v = exchange(torch.cat([k, v], dim=-1), *both).split([k.shape[-1], v.shape[-1]], dim=-1)
        return attend(q, k, v, context, *rest)

    def _kernel(self, kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Causal attention of this rank's two chunks; all other attention goes to the kernel as it is."""
        if not options["is_causal"] or q.shape[2] == k.shape[2]:
            return kernel(q, k, v, **options)
        out, chunk, rank = [], q.shape[2] // 2, self.ranks.rank
        for number, part in zip((rank, 2 * self.ranks.size - 1 - rank), q.chunk(2, 2), strict=True):
            end = (number + 1) * chunk
            given = {**options, "attn_mask": last_causal(chunk, end, q.device), "is_causal": False}
            out.append(kernel(part, k[:, :, :end], v[:, :, :end], **given))
        return torch.cat(out, dim=2)


def last_causal(queries: int, keys: int, device: torch.device) -> Any:
    """Return the causal mask of the last queries of a sequence. On a GPU it is never written out."""
    if device.type == "cuda":
        return causal_lower_right(queries, keys)
    index = torch.arange(keys, device=device)
    return masks.causal(index[keys - queries :], index)


def gather_keys(ranks: Ranks, x: Tensor) -> Tensor:
    """Return the keys and values (B,G,T,·) of all ranks, in the order of the sequence."""
    halves = [part.chunk(2, dim=2) for part in ranks.all_gather(x)]
    return torch.cat([*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim=2)


def scatter_keys(ranks: Ranks, gradient: Tensor) -> Tensor:
    """Return this rank's part of the sum over ranks of the gradient of all keys and values."""
    n = ranks.size
    chunks = gradient.chunk(2 * n, dim=2)
    return ranks.reduce_scatter(torch.stack([torch.cat([chunks[r], chunks[2 * n - 1 - r]], dim=2) for r in range(n)]))
