"""Memory of one rank in a training step, for every way in which ranks share the work (`strategy`).

A rank holds 12 bytes for each parameter of its share: the float32 weight and two AdamW moments. What else is alive
grows and shrinks. The peak is the largest of these moments:

    loss       everything that autograd saved in the forward pass (`activations`), and a chunk of logits with its
               gradient. Weights of embedding and head are gathered
    backward   what blocks saved, the whole gradient of the head, which waits for the end of the backward pass, a
               gathered layer and its gradient, the float32 gradient of the layer before it, which is being summed over
               ranks, and the gradients that flow through the feed-forward
    end        what one block saved, or the whole gradient of the last message in its own dtype and in float32, and all
               gradients of this rank

If weights are gathered in float32, autocast makes a bfloat16 copy of each matrix, and autograd keeps it. If they are
gathered in bfloat16, so is the embedding, and the residual stream is in bfloat16 from there on. With
`recompute`, only the inputs of blocks are saved, and what one block saves exists once. Devices that divide blocks
(`tensor`) divide heads, hidden units, logits and, between attention and feed-forward, the positions. Devices that
divide sequences (`context`) have all keys and values, and their part of everything else. With `data`, every device has
all weights and all gradients. `ranks_memory` in bench/developer compares all of this with fake and real ranks.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

from glassformer.config import Dense, FeedForward, Gated, ModelConfig, MoE, NoFeedForward
from glassformer.config.placement import cut_dimension, divided
from glassformer.sizing.activations import (
    Pass,
    saved_after_blocks,
    saved_before_blocks,
    saved_between,
    saved_by_block,
    saved_by_norm,
)
from glassformer.sizing.parameters import parameters
from glassformer.sizing.step import CHUNK_BYTES, CHUNKED_FROM, KERNEL_LOGIT, PLAIN_LOGIT
from glassformer.sizing.strategy import Strategy

STATE, GRADIENT, COPY = 12, 4, 2
"""Bytes per parameter: float32 weight and two AdamW moments; its gradient; the copy that autocast makes."""


@dataclass(frozen=True)
class Held:
    """Parameters of the devices that divide a model, before they are sharded: of one of them, in numbers."""

    total: float
    layer: float
    """Of one block."""
    rest: float
    """Of everything outside of blocks: embedding, head, final norm. It is gathered in one message."""


@functools.lru_cache(maxsize=256)
def held_parameters(config: ModelConfig, tensor: int) -> Held:
    """Return the parameters of one of `tensor` devices that divide a model."""
    shapes = parameters(config)
    blocks = {name: shape for name, shape in shapes.items() if ".blocks." in name}
    total, inside = count_part(shapes, tensor), count_part(blocks, tensor)
    layer = count_part({name: shape for name, shape in blocks.items() if ".blocks.0." in name}, tensor)
    return Held(total, layer, total - inside)


def count_part(shapes: Mapping[str, tuple[int, ...]], tensor: int) -> float:
    """Return the parameters that one of `tensor` devices has of these shapes."""
    return sum(math.prod(shape) / (1 if cut_dimension(name) is None else tensor) for name, shape in shapes.items())


@dataclass(frozen=True)
class Saved:
    """Bytes that autograd saves for a sequence, without the logits and copies of weights."""

    ends: float
    """By embedding, final norm and output, which the backward pass of the loss frees."""
    kept: float
    """By all blocks, at the end of the forward pass."""
    block: float
    """By one block, which with recomputation exists in the backward pass only."""


@functools.lru_cache(maxsize=1024)
def saved_by_sequence(
    config: ModelConfig, context: int, recompute: bool, tensor: int = 1, parts: int = 1, stream: int = 4
) -> Saved:
    """Return what autograd saves for one sequence on one of `tensor` x `parts` devices that compute it together.

    `stream` is the number of bytes of a number of the residual stream.
    """
    own = context // parts
    # fused attention kernels of GPUs apply dropout without the pattern; a mask has a byte per number
    plain = dataclasses.replace(divided(config, tensor), dropout=0.0)
    run = Pass(plain, 1, own, 2, causal=True, training=True, residual_width=stream)
    elsewhere = 1 - 1 / tensor
    ends = float(saved_before_blocks(run) + saved_after_blocks(run))
    if config.placement != "post":
        ends -= elsewhere * saved_by_norm(config.norm, run.tokens, config.d_model, run.norm_width)
    # keys and values of the other devices that divide a sequence
    others: float = (context - own) * run.config.n_kv_heads * (config.d_head + config.d_value) * run.width
    others += 2 * run.tokens * config.d_model / tensor if config.dropout else 0
    layers = range(config.n_layers)
    blocks = [saved_by_block(run, layer) + others - elsewhere * saved_between(run, layer) for layer in layers]
    return Saved(ends, config.n_layers * run.residual / tensor if recompute else sum(blocks), max(blocks))


def rank_bytes(
    config: ModelConfig,
    gpus: int,
    strategy: Strategy,
    batch: float,
    context: int,
    recompute: bool,
    weight_bytes: int = 4,
    plain_loss: bool = False,
) -> float:
    """Return the peak of bytes on each device. Devices that divide blocks or sequences compute `batch` together.

    `plain_loss`: the loss is computed by plain torch, as on a CPU or where the vocabulary is divided, not by a kernel.
    """
    held = held_parameters(config, strategy.tensor)
    stream = COPY if strategy.is_sharded and weight_bytes == COPY else 4  # the dtype of what the embedding returns
    each = saved_by_sequence(config, context, recompute, strategy.tensor, strategy.context, stream)
    ends, kept, block = batch * each.ends, batch * each.kept, batch * each.block
    saved = kept + (block if recompute else 0.0) + _flowing_bytes(config, batch * context, strategy, stream)
    if not strategy.is_sharded or weight_bytes > COPY:  # autograd keeps the copies; those of a recomputed block go
        kept += 0.0 if recompute else COPY * (held.total - held.rest)
        saved += COPY * (held.layer if recompute else held.total - held.rest)
        block += COPY * held.layer
    loss = ends + kept + _loss_bytes(config, batch * context / strategy.context, strategy, weight_bytes, plain_loss)
    shards = strategy.shards(gpus)
    table = config.vocab_size * config.d_model / strategy.tensor
    if not strategy.is_sharded:  # buckets hold all gradients at all times
        return (STATE + GRADIENT) * held.total + max(loss, saved + GRADIENT * table)
    if shards == 1:
        moments = (loss, saved + GRADIENT * (held.rest + held.layer), block + GRADIENT * held.total)
        return STATE * held.total + max(moments)
    rest, layer = weight_bytes * held.rest, weight_bytes * held.layer
    message = (weight_bytes + GRADIENT) * max(held.layer, held.rest)
    moments = (
        rest + loss,
        rest + weight_bytes * table + 2 * layer + GRADIENT * held.layer + saved,
        rest + max(message, 2 * layer + block) + GRADIENT * held.total / shards,
    )
    return STATE * held.total / shards + max(moments)


def _flowing_bytes(config: ModelConfig, tokens: float, strategy: Strategy, stream: int) -> float:
    """Return the gradients alive in the backward pass of a feed-forward, while almost all it saved is still there.

    Of a gated one, those of both factors of its hidden units; and those of its output, in two dtypes.
    """
    hidden = hidden_units(config.feedforward, gated=2) / strategy.tensor
    residual = config.d_model * (stream / strategy.tensor + 2)
    return tokens / strategy.context * (2 * hidden + residual)


def hidden_units(feedforward: FeedForward, gated: float) -> float:
    """Return the hidden numbers of a token over all active experts; each unit with a gate counts as `gated`."""
    match feedforward:
        case MoE(n_active=active, expert=expert):
            return active * hidden_units(expert, gated)
        case Gated(d_ff=width):
            return gated * width
        case Dense(d_ff=width):
            return width
        case NoFeedForward():
            return 0.0
        case _:
            assert_never(feedforward)


def _loss_bytes(config: ModelConfig, tokens: float, strategy: Strategy, weight_bytes: int, plain_loss: bool) -> float:
    """Return the peak bytes of head and loss, in addition to everything saved before them."""
    vocabulary = config.vocab_size / strategy.tensor
    table, hidden = vocabulary * config.d_model, 2 * tokens * config.d_model
    head = config.head
    if head is None:
        return 0.0
    alive = PLAIN_LOGIT if plain_loss or strategy.tensor > 1 else KERNEL_LOGIT
    if config.vocab_size < CHUNKED_FROM or head.has_transform or head.softcap is not None:
        # log-softmax, its gradient, and that of the logits
        return tokens * vocabulary * (PLAIN_LOGIT if strategy.tensor > 1 else 4 + 4 + 4)
    limit = CHUNK_BYTES / (alive if alive == PLAIN_LOGIT else 4) / vocabulary
    rows = min(tokens, 2 ** math.floor(math.log2(max(1.0, limit))))
    cast = 0.0 if weight_bytes == COPY else COPY * table
    summed = GRADIENT * table if tokens > rows else 0.0
    first = cast + hidden + summed + alive * rows * vocabulary
    # gradient of a chunk's logits, that of hidden states, that of the weight in bfloat16 and in float32
    second = cast + 2 * hidden + summed + 2 * rows * vocabulary + COPY * table + (0.0 if summed else GRADIENT * table)
    return max(first, second, 2 * hidden + 2 * GRADIENT * table)
