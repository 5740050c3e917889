"""A batch and the loss that is minimised over it: next token, masked language model, sequence to sequence.

A loss is a sum over targets divided by the number of targets of the whole step, which the caller gives. So parts of a
batch (accumulation steps, ranks) add up to exactly the loss of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.config import ModelConfig
from glassformer.model import NO_TAP, DecoderLM, Model, Seq2Seq, Tap, masks
from glassformer.model.moe import balance_loss
from glassformer.sizing.step import CHUNKED_FROM
from glassformer.training.chunked_loss import cross_entropy_sum, linear_cross_entropy
from glassformer.training.data.batches import IGNORED, mask_tokens, prefix_pairs
from glassformer.training.run import Loss, Run


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of a forward pass; `source` for an encoder-decoder."""

    inputs: Tensor
    targets: Tensor
    source: Tensor | None = None
    counted: int | None = None
    """Number of targets that are not ignored, counted before the batch moves to a device, to avoid a wait."""
    documents: Tensor | None = None
    """(B,T) number of the document of each token, where several share a sequence: they do not attend to one another."""
    reference: Tensor | None = None
    """(B,) log-probability of each sequence before training. Then sequences are pairs: chosen, rejected, chosen, …"""
    positions: Tensor | None = None
    """(B,T) position ids, of a batch whose tokens are not the beginning of a sequence (context parallelism)."""

    def to(self, device: torch.device) -> "Batch":
        if device.type == "cpu":
            return self

        def move(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.pin_memory().to(device, non_blocking=True)

        inputs, targets = move(self.inputs), move(self.targets)
        assert inputs is not None
        assert targets is not None
        moved = (move(self.source), self.n_targets(), move(self.documents), move(self.reference), move(self.positions))
        return Batch(inputs, targets, *moved)

    def rows(self, first: int, last: int) -> "Batch":
        """Return a range of the sequences, for example those of one accumulation step."""
        source, documents, reference, positions = (
            None if held is None else held[first:last]
            for held in (self.source, self.documents, self.reference, self.positions)
        )
        return Batch(self.inputs[first:last], self.targets[first:last], source, None, documents, reference, positions)

    def parts(self, size: int) -> Iterator["Batch"]:
        """Yield the sequences in parts of at most `size`; all ranks yield the same number."""
        n = self.inputs.shape[0]
        yield from (self.rows(first, min(n, first + size)) for first in range(0, n, size)) if n > size else (self,)

    def share(self, rank: int, world: int) -> "Batch":
        """Return the sequences of one rank, of a batch that all ranks have. Pairs of preferences stay together.

        A rank that gets none runs one sequence without targets, because sharded ranks must all run the model.
        """
        if world == 1:
            return self
        unit = 1 if self.reference is None else 2
        n = self.inputs.shape[0] // unit
        first, last = n * rank // world, n * (rank + 1) // world
        if first < last:
            return self.rows(first * unit, last * unit)
        one = self.rows(0, 1)
        return replace(one, targets=torch.full_like(one.targets, IGNORED), reference=None)

    def n_targets(self) -> int:
        """Return the number of targets, over which the loss is a mean: tokens, or pairs of preferences."""
        if self.reference is not None:
            return self.inputs.shape[0] // 2
        return int((self.targets != IGNORED).sum()) if self.counted is None else self.counted

    def n_tokens(self) -> int:
        """Return the number of tokens that the model reads."""
        return self.inputs.numel() + (0 if self.source is None else self.source.numel())


def make_batch(run: Run, window: tuple[Tensor, Tensor] | Batch, step: int, first_row: int = 0) -> Batch:
    """Return the batch of the objective for (inputs, next tokens) windows. Masks depend on (seed, step, row) alone."""
    if isinstance(window, Batch):
        return window
    inputs, following = window
    special = run.model.special
    match run.objective:
        case "masked":
            size, mask_id = run.model.vocab_size, run.loss.mask_token
            if mask_id is None:
                size = mask_id = run.model.vocab_size - 1  # the extra id that `fit_vocabulary` adds
            asked, targets = mask_tokens(inputs, mask_id, size, run.seed, step, run.loss.mask_rate, first_row)
            return Batch(asked, targets)
        case "seq2seq":
            source, given, targets = prefix_pairs(inputs, special.start or 0)
            return Batch(given, targets, source)
        case _:
            return Batch(inputs, following)


class Routers:
    """A tap that collects the decisions of the routers of a mixture of experts, for their balance loss."""

    def __init__(self) -> None:
        self.probabilities: list[Tensor] = []
        self.losses: list[Tensor] = []

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if site.endswith("feedforward.router"):
            self.probabilities.append(value)
        elif site.endswith("feedforward.choice"):
            self.losses.append(balance_loss(self.probabilities[-1], value))
        return value

    def wants(self, site: str) -> bool:
        return False


class Narrow:
    """A tap that casts the residual stream to another dtype than that of the weights, from the embedding on."""

    def __init__(self, tap: Tap, dtype: torch.dtype):
        self.tap, self.dtype = tap, dtype

    def __call__(self, site: str, value: Tensor) -> Tensor:
        value = self.tap(site, value)
        return value.to(self.dtype) if site.endswith("embed") else value

    def wants(self, site: str) -> bool:
        return self.tap.wants(site)


def summed_loss(
    model: Model,
    batch: Batch,
    loss: Loss,
    training: bool,
    stream: torch.dtype | None = None,
    float8: bool = False,
    finish: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """(what is minimised, plain cross-entropy), both summed over targets; `stream` is a dtype for the residual stream.

    `float8` computes the matmuls of the head in float8, where `float8_head` supports it. `finish` is used in place of
    `head_loss`, such as a compiled one.

    Minimised: cross-entropy with label smoothing + z_loss * logsumexp^2 per target + balance * mean balance loss of the
    layers per target. The balance loss is of the batch it sees: in accumulation, the mean over parts.
    """
    routers = Routers() if training and has_experts(model) else None
    tap: Tap = routers if routers is not None else NO_TAP
    if stream is not None:
        tap = Narrow(tap, stream)
    if batch.reference is not None:
        total = preference_loss(sequence_logprobs(model, batch, tap), batch.reference, loss.beta).sum()
        return total, total
    hidden = hidden_states(model, batch, tap)
    targets = batch.targets.flatten()
    parallel = getattr(model.head, "parallel_loss", None)  # of a vocabulary that ranks divide
    if parallel is not None:
        total, plain = parallel(model, hidden, targets, loss, training)
    elif chunked(model):
        compute = head_loss if finish is None else finish
        total, plain = compute(model, hidden, targets, loss, training, float8 and float8_head(model))
    else:
        total, plain = _plain_loss(model.logits(hidden, tap), targets, loss, training)
    if routers is not None and loss.balance:
        total = total + loss.balance * torch.stack(routers.losses).mean() * (targets != IGNORED).sum()
    return total, plain


def hidden_states(model: Model, batch: Batch, tap: Tap = NO_TAP) -> Tensor:
    """Return what the head reads, (B,T,D)."""
    if isinstance(model, Seq2Seq):
        assert batch.source is not None
        return model.decode_hidden(batch.inputs, model.encode(batch.source, tap=tap), tap=tap)
    if batch.documents is None:
        return model.encode(batch.inputs, positions=batch.positions, tap=tap)
    assert isinstance(model, DecoderLM)
    mask, positions = separate_documents(batch.documents, model.decoder.windows)
    return model.encode(batch.inputs, mask, positions, tap=tap)


def separate_documents(documents: Tensor, windows: Sequence[int | None] = (None,)) -> tuple[Tensor, Tensor]:
    """Return the mask and the positions (B,T) with which each document is computed as if it were alone.

    The mask is (B,T,T), or (B,L,T,T) if one of the L layers has a window shorter than the sequence.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    positions = document_positions(documents)
    mask = (documents[:, :, None] == documents[:, None, :]) & (index[:, None] >= index)
    if any(width is not None and width < len(index) for width in windows):
        # tokens of one document are as far apart in the sequence as in the document alone
        everywhere = torch.ones(len(index), len(index), dtype=torch.bool, device=index.device)
        near = [everywhere if width is None else masks.window(index, index, width) for width in windows]
        mask = mask[:, None] & torch.stack(near)
    return mask, positions


def document_positions(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, (B,T)."""
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


def sequence_logprobs(model: Model, batch: Batch, tap: Tap = NO_TAP) -> Tensor:
    """Return the log-probability of the targets of each sequence, (B,)."""
    logits = model.logits(hidden_states(model, batch, tap), tap).flatten(0, 1).float()
    losses = F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED, reduction="none")
    return -losses.view(batch.targets.shape).sum(1)


def preference_loss(logprobs: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Return -log sigmoid(beta ((c - c_ref) - (r - r_ref))) of each pair (Rafailov et al. 2023, equation 7).

    c and r are the log-probabilities of the chosen and the rejected sequence, which alternate.
    """
    chosen, rejected = (logprobs - reference).view(-1, 2).unbind(1)
    return -F.logsigmoid(beta * (chosen - rejected))


def chunked(model: Model) -> bool:
    """Return whether the head and loss run in chunks: where the logits would be the largest tensor of the step."""
    return has_plain_head(model.config) and model.config.vocab_size >= CHUNKED_FROM


def has_plain_head(config: ModelConfig) -> bool:
    """Return whether logits are a matmul of hidden states, plus a bias if any, and nothing else."""
    head = config.head
    return head is not None and not head.has_transform and head.softcap is None


def float8_head(model: Model) -> bool:
    """Return whether the matmuls of the head can be in float8: the loss runs in chunks and the head has no bias."""
    head = model.config.head
    return chunked(model) and head is not None and not head.bias


def head_loss(
    model: Model, hidden: Tensor, targets: Tensor, loss: Loss, training: bool, float8: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of hidden states (B,T,D) without ever holding all logits."""
    head = model.head
    assert head is not None
    weight = model.embed.tokens.weight if head.weight is None else head.weight
    rows = hidden.flatten(0, 1) * head.scale if head.scale != 1 else hidden.flatten(0, 1)
    if not training:
        plain = cross_entropy_sum(rows, weight, targets, head.bias, IGNORED)
        return plain, plain
    return linear_cross_entropy(rows, weight, targets, head.bias, IGNORED, loss.label_smoothing, loss.z_loss, float8)


def _plain_loss(logits: Tensor, targets: Tensor, loss: Loss, training: bool) -> tuple[Tensor, Tensor]:
    flat = logits.flatten(0, 1).float()
    plain = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    if not training:
        return plain, plain
    total = plain
    if loss.label_smoothing:
        total = F.cross_entropy(
            flat, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=loss.label_smoothing
        )
    if loss.z_loss:
        total = total + loss.z_loss * (flat.logsumexp(-1).square() * (targets != IGNORED)).sum()
    return total, plain


def has_experts(model: Model) -> bool:
    """Return whether tokens are routed to experts, so that the operations of a step depend on the data."""
    return any(hasattr(block.feedforward, "router") for block in model.blocks)
