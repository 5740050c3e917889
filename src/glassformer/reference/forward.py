"""A complete Transformer, forward: decoder-only, encoder-only and encoder-decoder.

The order of computation in a stack is embedding, blocks, final norm, head. There is no dropout: the oracle computes the
model in evaluation mode. Every function returns its output together with the activations it saved. Pass `record={}` to
a public function to receive them, under names such as `blocks.0.attention.pattern` (in an encoder-decoder
`decoder.blocks.0.attention.pattern`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from glassformer.config import (
    Alibi,
    EncoderConfig,
    ModelConfig,
    QueryKeyPosition,
    Rotary,
    Seq2SeqConfig,
    T5Bias,
)
from glassformer.reference.arrays import Array, Mask, Params, Saved, Tokens, add_prefix, select_prefix
from glassformer.reference.attention import CosSin, soft_cap
from glassformer.reference.block import ForwardContext, block
from glassformer.reference.embedding import embed, position_vectors
from glassformer.reference.masks import as_mask, default_positions, self_mask
from glassformer.reference.ops import activate, linear, normalize
from glassformer.reference.params import as_params, block_index, layer_count, stack_name
from glassformer.reference.positions import alibi_bias, rotary_cos_sin, t5_bias, t5_buckets


def forward(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: npt.ArrayLike,
    *,
    mask: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
    segments: npt.ArrayLike | None = None,
    record: Saved | None = None,
) -> Array:
    """Return the logits (B,T,V) of a decoder-only or encoder-only model for tokens (B,T).

    Args:
        mask: (B,T), True = real token, or (B,T,T), an attention mask that replaces the model's own.
        positions: (B,T), position ids. Default: the number of real tokens before each token. They do not change the
            causal mask or the window, which are defined by index.
        segments: (B,T), segment ids (BERT). Default: all 0.
        record: a dict that receives the saved activations.
    """
    _check_not_seq2seq(config, "forward")
    weights = as_params(config, params)
    hidden, saved = run_stack(config, weights, stack_name(config), tokens, mask, positions, segments)
    logits, saved_head = head(config, weights, hidden)
    _add_to_record(record, saved | add_prefix(saved_head, "head"))
    return logits


def encode(
    config: ModelConfig,
    params: Mapping[str, Any],
    tokens: npt.ArrayLike,
    *,
    mask: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
    segments: npt.ArrayLike | None = None,
    record: Saved | None = None,
) -> Array:
    """Return the residual stream (B,T,D) after the last block and the final norm, before the head.

    For an encoder-decoder this is the output of the encoder, which the cross-attention of the decoder reads.
    """
    weights = as_params(config, params)
    stack = "encoder" if isinstance(config, Seq2SeqConfig) else stack_name(config)
    hidden, saved = run_stack(config, weights, stack, tokens, mask, positions, segments)
    _add_to_record(record, saved)
    return hidden


def pool(config: ModelConfig, params: Mapping[str, Any], hidden: Array) -> Array:
    """Return BERT's pooled output, tanh(W h_0 + b): (B,T,D) -> (B,D), computed from the first position only."""
    if not (isinstance(config, EncoderConfig) and config.pooler):
        raise ValueError("this config has no pooler: use an EncoderConfig with pooler=True.")
    return np.tanh(linear(as_params(config, params), "pooler", np.asarray(hidden, dtype=np.float64)[:, 0]))


def forward_seq2seq(
    config: Seq2SeqConfig,
    params: Mapping[str, Any],
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    *,
    source_mask: npt.ArrayLike | None = None,
    mask: npt.ArrayLike | None = None,
    record: Saved | None = None,
) -> Array:
    """Return the logits (B,T,V) of an encoder-decoder for source (B,S) and decoder input target (B,T).

    `source_mask` (B,S) is True for real source tokens; the encoder and the cross-attention ignore the others. `mask` is
    the mask of the target, as in `forward`.
    """
    weights = as_params(config, params)
    logits, saved = run_seq2seq(config, weights, source, target, source_mask, mask)
    _add_to_record(record, saved)
    return logits


def run_seq2seq(
    config: Seq2SeqConfig,
    weights: Params,
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    source_mask: npt.ArrayLike | None,
    mask: npt.ArrayLike | None,
) -> tuple[Array, Saved]:
    """Run encoder, decoder and head; return the logits (B,T,V) and the saved activations."""
    B, S = np.shape(source)
    real = as_mask(source_mask, B, S)
    if real is not None and real.ndim != 2:
        raise ValueError(
            f"source_mask has shape {real.shape}: give ({B}, {S}), True = real token, because cross-attention needs it."
        )
    memory, saved_encoder = run_stack(config, weights, "encoder", source, real)
    source_real = np.ones((B, S), dtype=np.bool_) if real is None else real
    cross_allowed = np.broadcast_to(source_real[:, None, :], (B, np.shape(target)[1], S))  # the same for every query
    hidden, saved_decoder = run_stack(
        config, weights, "decoder", target, mask, memory=memory, memory_allowed=cross_allowed
    )
    logits, saved_head = head(config, weights, hidden)
    return logits, add_prefix(saved_encoder, "encoder") | add_prefix(saved_decoder, "decoder") | add_prefix(
        saved_head, "head"
    )


def run_stack(
    config: ModelConfig,
    weights: Params,
    stack: str,
    tokens: npt.ArrayLike,
    mask: npt.ArrayLike | None = None,
    positions: npt.ArrayLike | None = None,
    segments: npt.ArrayLike | None = None,
    memory: Array | None = None,
    memory_allowed: Mask | None = None,
) -> tuple[Array, Saved]:
    """Run embedding, blocks and final norm of one stack: tokens (B,T) -> (B,T,D), and the saved activations.

    `stack` is `encoder` or `decoder`. `memory` (B,S,D) and `memory_allowed` (B,T,S) are the input and the mask of the
    cross-attention in an encoder-decoder.
    """
    ids = as_tokens(config, tokens)
    B, T = ids.shape
    real = as_mask(mask, B, T)
    position_ids = default_positions(B, T, real) if positions is None else _as_positions(positions, B, T)
    x, saved = embed(config, weights, stack, ids, position_ids, segments)
    bias = score_bias(config, weights, stack, position_ids)
    qk_position = qk_position_embedding(config, weights, stack, position_ids)
    for layer in range(layer_count(config, stack)):
        allowed = self_mask(B, T, stack == "decoder", config.window(layer), real)
        cos_sin = rotary_embedding(config, position_ids, layer)
        context = ForwardContext(allowed, bias, cos_sin, qk_position, memory, memory_allowed, layer)
        own = select_prefix(weights, f"{stack}.blocks.{block_index(config, layer)}")
        x, saved_block = block(config, own, x, context)
        saved |= add_prefix(saved_block, f"blocks.{layer}")
    if config.placement != "post":
        saved["norm.input"] = x
        x = normalize(config.norm, weights, f"{stack}.norm", x)
    saved["final"] = x
    return x, saved


def qk_position_embedding(config: ModelConfig, weights: Params, stack: str, position_ids: Tokens) -> Array | None:
    """Return the query/key position embedding (B,T,D), which every block adds to the input of q and k.

    None unless the config uses such an embedding (`position.kind = "query_key"`).
    """
    if isinstance(config.position, QueryKeyPosition):
        return position_vectors(config, config.position.vectors, weights, stack, position_ids)
    return None


def score_bias(config: ModelConfig, weights: Params, stack: str, position_ids: Tokens) -> Array | None:
    """Return the bias (B,H,T,T) that ALiBi or T5 adds to the self-attention scores of every layer; otherwise None.

    `config.score_bias` is a T5 bias next to another position scheme (Song et al. 2020, MPNet); the biases add up.
    """
    biases: list[Array] = []
    if isinstance(config.position, Alibi):
        biases.append(alibi_bias(config.position, position_ids, config.n_heads))
    for name, scheme in (("position", config.position), ("score_bias", config.score_bias)):
        if isinstance(scheme, T5Bias):
            buckets = t5_buckets(scheme, position_ids, bidirectional=stack == "encoder")
            biases.append(t5_bias(weights[f"{stack}.{name}.weight"], buckets))
    return np.sum(biases, axis=0) if biases else None


def rotary_embedding(config: ModelConfig, position_ids: Tokens, layer: int = 0) -> CosSin | None:
    """Return cos and sin of the rotary angles of one layer, (B,T,R/2) each; None if the layer does not rotate."""
    rotary = config.layer_position(layer)
    return rotary_cos_sin(rotary, config.d_head, position_ids) if isinstance(rotary, Rotary) else None


def head(config: ModelConfig, weights: Params, hidden: Array) -> tuple[Array, Saved]:
    """Compute the logits: (B,T,D) -> (B,T,V).

        logits = scale * h W^T + b,   h = norm(activation(W_t x + b_t)) with a transform (BERT), otherwise h = x

    With `head.width` alone h = W_t x + b_t: a projection to the width of the output matrix. With `softcap` c, the
    logits z become c tanh(z / c). A tied head uses the token embedding table as W, so the logit of a token is the dot
    product of h with its embedding.
    """
    if config.head is None:
        raise ValueError("this config has head=None, so it has no logits: use encode for the hidden states.")
    saved: Saved = {"input": hidden}
    h = hidden
    if config.head.transform is not None or config.head.width is not None:
        h = saved["transform"] = linear(weights, "head.transform", h)
    if config.head.transform is not None:
        saved["norm.input"] = activate(config.head.transform, h)
        h = normalize(config.norm, weights, "head.norm", saved["norm.input"])
    saved["hidden"] = h
    table = weights["embed.tokens.weight"] if config.head.tied else weights["head.weight"]
    logits = config.head.scale * h @ table.T
    if config.head.bias:
        logits = logits + weights["head.bias"]
    logits = soft_cap(config.head.softcap, logits)
    return logits, saved | {"logits": logits}


def as_tokens(config: ModelConfig, tokens: npt.ArrayLike) -> Tokens:
    """Return the token ids (B,T) as int64.

    Raises:
        ValueError: the shape is not (B,T), the dtype is not an integer type, or an id is outside the vocabulary.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens must be integers of shape (B, T), got {ids.dtype} of shape {ids.shape}.")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(
            f"token ids are between {ids.min()} and {ids.max()}, but the vocabulary has {config.vocab_size} tokens: "
            f"use ids from 0 to {config.vocab_size - 1}."
        )
    return ids.astype(np.int64)


def _as_positions(positions: npt.ArrayLike, B: int, T: int) -> Tokens:
    position_ids = np.asarray(positions)
    if position_ids.shape != (B, T) or not np.issubdtype(position_ids.dtype, np.integer):
        raise ValueError(
            f"positions must be integers of shape ({B}, {T}), got {position_ids.dtype} of shape {position_ids.shape}."
        )
    if position_ids.min() < 0:
        raise ValueError(f"positions count from 0, but the smallest one given is {position_ids.min()}.")
    return position_ids.astype(np.int64)


def _check_not_seq2seq(config: ModelConfig, function: str) -> None:
    if isinstance(config, Seq2SeqConfig):
        raise ValueError(f"{function} takes one sequence, but an encoder-decoder takes two: use forward_seq2seq.")


def _add_to_record(record: Saved | None, saved: Saved) -> None:
    if record is not None:
        record.update(saved)
