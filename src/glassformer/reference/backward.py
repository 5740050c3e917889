"""A complete Transformer, backward: the loss of a language model and its gradient, derived by hand, without autograd.

Every function is the backward pass of one function of forward.py. It receives the activations that function saved and
the gradient of the loss with respect to its output. It returns the gradient with respect to its input and parameters.
Notation: d_y is the gradient of the loss with respect to y. A residual connection y = x + f(x) passes d_y on unchanged
and adds the gradient that flows back through f.

The model can be a decoder (targets are the next tokens), an encoder (targets are the masked-out tokens, all others are
ignored) or an encoder-decoder.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from glassformer.config import Learned, ModelConfig, QueryKeyPosition, Seq2SeqConfig, T5Bias
from glassformer.reference.arrays import Array, Params, Saved, Tokens, add_prefix, select_prefix
from glassformer.reference.backward_attention import t5_bias_backward
from glassformer.reference.backward_block import BlockBackward
from glassformer.reference.backward_ops import (
    IGNORE,
    activation_derivative,
    cross_entropy,
    cross_entropy_backward,
    linear_backward,
    lookup_backward,
    normalize_backward,
)
from glassformer.reference.embedding import embed_backward
from glassformer.reference.forward import as_tokens, forward, head, rotary_embedding, run_seq2seq, run_stack
from glassformer.reference.masks import as_mask, default_positions
from glassformer.reference.params import as_params, block_index, layer_count, stack_name
from glassformer.reference.positions import t5_buckets


def loss(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: npt.ArrayLike,
    targets: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
) -> float:
    """Return the cross-entropy: the mean of -log p(target) over all targets other than -100.

    `targets` (B,T) has the shape of `tokens`. targets[b,t] is the label of the logits at position t: for a decoder, the
    token at t + 1. This function does not shift the targets. A target of -100 is ignored.
    """
    return cross_entropy(forward(config, params, tokens, mask=mask), as_targets(config, targets))


def loss_and_gradients(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: npt.ArrayLike,
    targets: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
) -> tuple[float, Params]:
    """Return the loss and its gradient with respect to every parameter, under the names of the parameters.

    The arguments are those of `loss`.
    """
    weights, labels = as_params(config, params), as_targets(config, targets)
    stack = stack_name(config)
    hidden, saved = run_stack(config, weights, stack, tokens, mask)
    logits, saved_head = head(config, weights, hidden)
    gradients = {name: np.zeros_like(value) for name, value in weights.items()}
    d_hidden, head_gradients = head_backward(config, weights, saved_head, cross_entropy_backward(logits, labels))
    _, stack_gradients = stack_backward(config, weights, stack, saved, d_hidden, tokens, mask)
    _accumulate(gradients, head_gradients)
    _accumulate(gradients, stack_gradients)
    return cross_entropy(logits, labels), gradients


def loss_and_gradients_seq2seq(
    config: Seq2SeqConfig,
    params: Mapping[str, Any],
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    labels: npt.ArrayLike,
    source_mask: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
) -> tuple[float, Params]:
    """Return the loss and gradients of an encoder-decoder for source (B,S), decoder input target (B,T), labels (B,T).

    Every cross-attention of the decoder reads the same memory, so the backward pass of the encoder starts from the sum
    of their gradients.
    """
    weights, label_ids = as_params(config, params), as_targets(config, labels)
    logits, saved = run_seq2seq(config, weights, source, target, source_mask, mask)
    gradients = {name: np.zeros_like(value) for name, value in weights.items()}
    d_logits = cross_entropy_backward(logits, label_ids)
    d_hidden, head_gradients = head_backward(config, weights, select_prefix(saved, "head"), d_logits)
    _accumulate(gradients, head_gradients)
    d_memory, decoder_gradients = stack_backward(
        config, weights, "decoder", select_prefix(saved, "decoder"), d_hidden, target, mask
    )
    _accumulate(gradients, decoder_gradients)
    assert d_memory is not None
    _, encoder_gradients = stack_backward(
        config, weights, "encoder", select_prefix(saved, "encoder"), d_memory, source, source_mask
    )
    _accumulate(gradients, encoder_gradients)
    return cross_entropy(logits, label_ids), gradients


def head_backward(config: ModelConfig, weights: Params, saved: Saved, d_logits: Array) -> tuple[Array, Params]:
    """Backward pass of `head`: d_logits (B,T,V) -> d_h (B,T,D) and the gradients of the head.

        logits_v = scale * h . W_v + b_v
        d_h = scale * sum_v d_logits_v W_v,   d_W_v = scale * d_logits_v h,   d_b_v = d_logits_v

    A soft cap a first multiplies d_logits by 1 - (logits/a)^2. d_W and d_b are summed over all positions. The W of a
    tied head is the token embedding table, whose gradient is the sum of this one and the one of the embedding.
    """
    assert config.head is not None
    if config.head.softcap is not None:
        d_logits = d_logits * (1 - (saved["logits"] / config.head.softcap) ** 2)
    table = "embed.tokens.weight" if config.head.tied else "head.weight"
    flat_d_logits = d_logits.reshape(-1, config.vocab_size)
    flat_h = saved["hidden"].reshape(len(flat_d_logits), -1)
    gradients: Params = {table: config.head.scale * flat_d_logits.T @ flat_h}
    if config.head.bias:
        gradients["head.bias"] = flat_d_logits.sum(axis=0)
    d_h = config.head.scale * d_logits @ weights[table]
    if config.head.transform is not None:
        d_h, norm_gradients = normalize_backward(config.norm, weights, "head.norm", saved["norm.input"], d_h)
        d_h = d_h * activation_derivative(config.head.transform, saved["transform"])
        gradients |= norm_gradients
    if "transform" in saved:
        d_h, linear_gradients = linear_backward(weights, "head.transform", saved["input"], d_h)
        gradients |= linear_gradients
    return d_h, gradients


def stack_backward(
    config: ModelConfig,
    weights: Params,
    stack: str,
    saved: Saved,
    d_x: Array,
    tokens: npt.ArrayLike,
    mask: npt.ArrayLike | None,
) -> tuple[Array | None, Params]:
    """Backward pass of `run_stack`: final norm, blocks from last to first, embedding.

    Returns the gradient of the memory (None without cross-attention) and the gradients of the parameters. Every block
    reads the same T5 bias table, so the gradient of the table is computed from the sum of d_scores over the blocks. For
    a learned query/key position embedding it is the sum of d_qk_position.
    """
    ids = as_tokens(config, tokens)
    B, T = ids.shape
    position_ids = default_positions(B, T, as_mask(mask, B, T))
    gradients: Params = {}
    if config.placement != "post":
        d_x, gradients = normalize_backward(config.norm, weights, f"{stack}.norm", saved["norm.input"], d_x)
    d_memory: Array | None = None
    d_scores, d_qk_position = np.zeros(1), np.zeros(1)
    for layer in reversed(range(layer_count(config, stack))):
        name = f"{stack}.blocks.{block_index(config, layer)}"
        block_weights, block_saved = select_prefix(weights, name), select_prefix(saved, f"blocks.{layer}")
        cos_sin = rotary_embedding(config, position_ids, layer)
        block_backward = BlockBackward(config, block_weights, block_saved, cos_sin, layer)
        d_x = block_backward(d_x)
        for parameter, gradient in add_prefix(block_backward.gradients, name).items():
            gradients[parameter] = gradients.get(parameter, 0) + gradient  # layers that share a block add up
        d_scores, d_qk_position = d_scores + block_backward.d_scores, d_qk_position + block_backward.d_qk_position
        if block_backward.d_memory is not None:
            d_memory = block_backward.d_memory if d_memory is None else d_memory + block_backward.d_memory
    for owner, scheme in (("position", config.position), ("score_bias", config.score_bias)):
        if isinstance(scheme, T5Bias):
            table = f"{stack}.{owner}.weight"
            buckets = t5_buckets(scheme, position_ids, bidirectional=stack == "encoder")
            gradients[table] = t5_bias_backward(weights[table].shape, buckets, d_scores)
    if isinstance(config.position, QueryKeyPosition) and isinstance(config.position.vectors, Learned):
        table, rows = f"{stack}.position.weight", position_ids + config.position.vectors.offset
        gradients[table] = lookup_backward(weights[table].shape, rows, d_qk_position)
    return d_memory, gradients | embed_backward(config, weights, stack, saved, d_x, ids, position_ids)


def sgd(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: npt.ArrayLike,
    targets: npt.ArrayLike,
    steps: int,
    lr: float,
) -> list[float]:
    """Run gradient descent on one batch, w <- w - lr dL/dw; return the loss before each step and after the last one.

    The params passed in are not modified.
    """
    weights = as_params(config, params)
    losses = []
    for _ in range(steps):
        value, gradients = loss_and_gradients(config, weights, tokens, targets)
        losses.append(value)
        weights = {name: weights[name] - lr * gradients[name] for name in weights}
    return [*losses, loss(config, weights, tokens, targets)]


def as_targets(config: ModelConfig, targets: npt.ArrayLike) -> Tokens:
    """Return the targets (B,T) as int64.

    Raises:
        ValueError: the dtype is not an integer type, or an id is neither in the vocabulary nor -100.
    """
    ids = np.asarray(targets)
    if not np.issubdtype(ids.dtype, np.integer) or not np.all(
        (ids == IGNORE) | ((ids >= 0) & (ids < config.vocab_size))
    ):
        raise ValueError(f"targets must be ids from 0 to {config.vocab_size - 1}, or {IGNORE} to ignore a position.")
    return ids.astype(np.int64)


def _accumulate(gradients: Params, more: Params) -> None:
    """Add `more` to `gradients` in place: embedding, tied head and both stacks share the token embedding table."""
    for name, value in more.items():
        gradients[name] = gradients[name] + value
