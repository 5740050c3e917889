"""A whole Transformer, forward: decoder-only, encoder-only and encoder-decoder.

Read from the bottom of a stack to its top: embed, blocks, final norm, head. No dropout: the oracle is the model at
test time. Every function returns its output together with what it computed on the way; pass `record={}` to a public
function to look at that, under names such as `block.0.attention.pattern` (`decoder.block.0.attention.pattern` in an
encoder-decoder).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from glassformer.config import (
    Alibi,
    EncoderConfig,
    Learned,
    ModelConfig,
    NoFeedForward,
    NoPosition,
    QueryKeyPosition,
    Rotary,
    Seq2SeqConfig,
    Sinusoidal,
    T5Bias,
)
from glassformer.reference.arrays import Array, Mask, Params, Saved, Tokens, over, under
from glassformer.reference.attention import Waves, attention
from glassformer.reference.feedforward import feedforward
from glassformer.reference.masks import as_mask, default_positions, self_mask
from glassformer.reference.ops import activate, linear, normalize
from glassformer.reference.params import as_params, stack_name
from glassformer.reference.positions import alibi_bias, rotary_waves, sinusoidal, t5_bias, t5_buckets

Branch = Callable[[Array], tuple[Array, Saved]]


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
    """Logits (B,T,V) of a decoder-only or encoder-only model for tokens (B,T).

    `mask` is (B,T), which tokens are real, or (B,T,T), the whole pattern. `positions` (B,T) overrides the counting of
    real tokens; it moves no mask, for causality and the window go by index.
    """
    _refuse_seq2seq(config, "forward")
    weights = as_params(config, params)
    hidden, saved = run_stack(config, weights, stack_name(config), tokens, mask, positions, segments)
    logits, saved_head = head(config, weights, hidden)
    _fill(record, saved | over(saved_head, "head"))
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
    """The residual stream (B,T,D) after the last block and the final norm, before any head.

    Of an encoder-decoder it is the encoder's: the memory that the decoder reads.
    """
    weights = as_params(config, params)
    stack = "encoder" if isinstance(config, Seq2SeqConfig) else stack_name(config)
    hidden, saved = run_stack(config, weights, stack, tokens, mask, positions, segments)
    _fill(record, saved)
    return hidden


def pool(config: ModelConfig, params: Mapping[str, Any], hidden: Array) -> Array:
    """tanh(W h_0 + b), (B,T,D) -> (B,D): BERT's summary of a text, read off its first token."""
    if not (isinstance(config, EncoderConfig) and config.pooler):
        raise ValueError("this config has no pooler: only EncoderConfig(pooler=True) does.")
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
    """Logits (B,T,V) of an encoder-decoder that reads source (B,S) and has written target (B,T).

    `source_mask` (B,S) says which source tokens are real: the encoder and the cross-attention both skip the others.
    `mask` is the target's, as in `forward`.
    """
    weights = as_params(config, params)
    logits, saved = run_seq2seq(config, weights, source, target, source_mask, mask)
    _fill(record, saved)
    return logits


def run_seq2seq(
    config: Seq2SeqConfig,
    weights: Params,
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    source_mask: npt.ArrayLike | None,
    mask: npt.ArrayLike | None,
) -> tuple[Array, Saved]:
    """`forward_seq2seq` with what it computed: encoder, then decoder over the encoder's memory, then head."""
    B, S = np.shape(source)
    real = as_mask(source_mask, B, S)
    if real is not None and real.ndim != 2:
        raise ValueError(f"source_mask has shape {real.shape}: cross-attention needs ({B}, {S}), the real tokens.")
    memory, saved_encoder = run_stack(config, weights, "encoder", source, real)
    seen = np.ones((B, S), dtype=np.bool_) if real is None else real
    every_query = np.broadcast_to(seen[:, None, :], (B, np.shape(target)[1], S))
    hidden, saved_decoder = run_stack(
        config, weights, "decoder", target, mask, memory=memory, memory_allowed=every_query
    )
    logits, saved_head = head(config, weights, hidden)
    return logits, over(saved_encoder, "encoder") | over(saved_decoder, "decoder") | over(saved_head, "head")


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
    """Embedding, blocks and final norm of one stack: tokens (B,T) -> (B,T,D), and everything on the way."""
    ids = as_tokens(config, tokens)
    B, T = ids.shape
    real = as_mask(mask, B, T)
    places = default_positions(B, T, real) if positions is None else _as_positions(positions, B, T)
    x, saved = embed(config, weights, stack, ids, places, segments)
    bias, waves = score_bias(config, weights, stack, places), attention_waves(config, places)
    infused = infusion(config, weights, stack, places)
    n_layers = config.n_encoder_layers if isinstance(config, Seq2SeqConfig) and stack == "encoder" else config.n_layers
    for layer in range(n_layers):
        allowed = self_mask(B, T, stack == "decoder", config.window(layer), real)
        around = Surroundings(allowed, bias, waves, infused, memory, memory_allowed)
        x, saved_block = block(config, under(weights, f"{stack}.blocks.{layer}"), x, around)
        saved |= over(saved_block, f"block.{layer}")
    if config.placement != "post":
        saved["norm.input"] = x
        x = normalize(config.norm, weights, f"{stack}.norm", x)
    saved["final"] = x
    return x, saved


def embed(
    config: ModelConfig,
    weights: Params,
    stack: str,
    ids: Tokens,
    places: Tokens,
    segments: npt.ArrayLike | None,
) -> tuple[Array, Saved]:
    """scale * tokens[id] + segments[s] + position, then the norm if there is one: (B,T) -> (B,T,D).

    Segments that are not given are all 0, as in BERT.
    """
    x = config.embedding.scale * weights["embed.tokens.weight"][ids]
    if config.embedding.n_segments:
        kinds = np.zeros_like(ids) if segments is None else np.asarray(segments, dtype=np.int64)
        x = x + weights["embed.segments.weight"][kinds]
    elif segments is not None:
        raise ValueError("segments were given, but embedding.n_segments is 0: this model has no segment table.")
    if isinstance(config.position, Learned | Sinusoidal):
        x = x + position_vectors(config, config.position, weights, stack, places)
    saved = {"embed.sum": x}
    if config.embedding.norm:
        x = normalize(config.norm, weights, f"{stack}.embed_norm", x)
    return x, saved | {"embed": x}


def position_vectors(
    config: ModelConfig, kind: Learned | Sinusoidal, weights: Params, stack: str, places: Tokens
) -> Array:
    """(B,T) -> (B,T,D): rows of the trained table, or fixed waves."""
    if isinstance(kind, Sinusoidal):
        return sinusoidal(kind, places, config.d_model)
    table = weights[f"{stack}.position.weight"]
    rows = places + kind.offset
    if rows.max(initial=0) >= len(table):
        raise ValueError(f"position {places.max()} is past the learned table of max_len={config.max_len}.")
    return table[rows]


def infusion(config: ModelConfig, weights: Params, stack: str, places: Tokens) -> Array | None:
    """(B,T,D) that queries and keys of every block read beside their input; None unless positions are infused."""
    if isinstance(config.position, QueryKeyPosition):
        return position_vectors(config, config.position.vectors, weights, stack, places)
    return None


def score_bias(config: ModelConfig, weights: Params, stack: str, places: Tokens) -> Array | None:
    """(B,H,T,T) that ALiBi or T5 adds to the scores of every layer's self-attention; None with other schemes."""
    match config.position:
        case Alibi():
            return alibi_bias(places, config.n_heads)
        case T5Bias():
            buckets = t5_buckets(config.position, places, bidirectional=stack == "encoder")
            return t5_bias(weights[f"{stack}.position.weight"], buckets)
        case NoPosition() | Learned() | Sinusoidal() | Rotary() | QueryKeyPosition():
            return None
        case _:
            assert_never(config.position)


def attention_waves(config: ModelConfig, places: Tokens) -> Waves | None:
    """cos and sin that turn queries and keys, with rotary positions; None with other schemes."""
    if isinstance(config.position, Rotary):
        return rotary_waves(config.position, config.d_head, places)
    return None


@dataclass(frozen=True)
class Surroundings:
    """What a block is given besides its input."""

    allowed: Mask
    """(B,T,T): the pattern of its self-attention."""
    bias: Array | None
    """(B,H,T,T): what ALiBi or T5 adds to the scores."""
    waves: Waves | None
    """What rotary positions turn queries and keys by."""
    infused: Array | None
    """(B,T,D): what infused positions add to the input of queries and keys."""
    memory: Array | None
    """(B,S,D): the encoder's output, in the decoder of an encoder-decoder."""
    memory_allowed: Mask | None
    """(B,T,S): True where the source token is real."""


def block(config: ModelConfig, weights: Params, x: Array, around: Surroundings) -> tuple[Array, Saved]:
    """One block, (B,T,D) -> (B,T,D).

    pre       x + attention(norm(x)), then x + cross(norm(x)), then x + feedforward(norm(x))
    post      norm(x + attention(x)), likewise the others: the order of Vaswani et al. 2017
    parallel  n = norm(x); x + attention(n) + feedforward(n): Wang and Komatsuzaki 2021 (GPT-J)
    An attention-only block is pre or post without its last branch.
    """

    def look(n: Array) -> tuple[Array, Saved]:
        own = under(weights, "attention")
        return attention(config, own, n, n, around.allowed, around.bias, around.waves, around.infused)

    def consult(n: Array) -> tuple[Array, Saved]:
        assert around.memory is not None
        assert around.memory_allowed is not None
        return attention(config, under(weights, "cross"), n, around.memory, around.memory_allowed)

    def think(n: Array) -> tuple[Array, Saved]:
        assert not isinstance(config.feedforward, NoFeedForward)
        return feedforward(config.feedforward, under(weights, "feedforward"), n)

    saved: Saved = {"resid_pre": x}
    if config.placement == "parallel":
        saved["norm.input"] = x
        n = normalize(config.norm, weights, "norm", x)
        looked, saved_attention = look(n)
        thought, saved_feedforward = think(n)
        x = x + looked + thought
        saved |= over(saved_attention, "attention") | over(saved_feedforward, "feedforward")
    else:
        branches: list[tuple[str, Branch]] = [("attention", look)]
        if around.memory is not None:
            branches.append(("cross", consult))
        if not isinstance(config.feedforward, NoFeedForward):
            branches.append(("feedforward", think))
        for name, branch in branches:
            x, saved_branch = residual(config, weights, name, branch, x)
            saved |= saved_branch
    return x, saved | {"resid_post": x}


def residual(config: ModelConfig, weights: Params, name: str, branch: Branch, x: Array) -> tuple[Array, Saved]:
    """x + branch(norm(x)) when the norm comes before, norm(x + branch(x)) when it comes after."""
    norm = f"norm_{name}"
    if config.placement == "pre":
        out, saved = branch(normalize(config.norm, weights, norm, x))
        return x + out, over(saved, name) | {f"{norm}.input": x}
    out, saved = branch(x)
    total = x + out
    return normalize(config.norm, weights, norm, total), over(saved, name) | {f"{norm}.input": total}


def head(config: ModelConfig, weights: Params, hidden: Array) -> tuple[Array, Saved]:
    """logits = (scale * h) W^T + bias, (B,T,D) -> (B,T,V); with a transform h = norm(activation(transform(x))).

    W is the token table when tied: a token's logit is then the inner product with its own embedding.
    """
    if config.head is None:
        raise ValueError("this config has head=None and so no logits: use encode for the hidden states.")
    saved: Saved = {"input": hidden}
    h = hidden
    if config.head.transform is not None:
        saved["transform"] = linear(weights, "head.transform", h)
        saved["norm.input"] = activate(config.head.transform, saved["transform"])
        h = normalize(config.norm, weights, "head.norm", saved["norm.input"])
    saved["hidden"] = h
    table = weights["embed.tokens.weight"] if config.head.tied else weights["head.weight"]
    logits = config.head.scale * h @ table.T
    if config.head.bias:
        logits = logits + weights["head.bias"]
    return logits, saved | {"logits": logits}


def as_tokens(config: ModelConfig, tokens: npt.ArrayLike) -> Tokens:
    """Ids (B,T) as int64. Raises ValueError on another shape, no whole numbers, or an id outside the vocabulary."""
    ids = np.asarray(tokens)
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"tokens are whole numbers of shape (B, T), got {ids.dtype} of shape {ids.shape}.")
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(f"token ids run from {ids.min()} to {ids.max()}; the vocabulary has {config.vocab_size}.")
    return ids.astype(np.int64)


def _as_positions(positions: npt.ArrayLike, B: int, T: int) -> Tokens:
    places = np.asarray(positions)
    if places.shape != (B, T) or not np.issubdtype(places.dtype, np.integer):
        raise ValueError(f"positions are whole numbers of shape ({B}, {T}), got {places.dtype} of {places.shape}.")
    if places.min() < 0:
        raise ValueError(f"positions count from 0, got {places.min()}.")
    return places.astype(np.int64)


def _refuse_seq2seq(config: ModelConfig, function: str) -> None:
    if isinstance(config, Seq2SeqConfig):
        raise ValueError(f"{function} takes one sequence; an encoder-decoder takes two: use forward_seq2seq.")


def _fill(record: Saved | None, saved: Saved) -> None:
    if record is not None:
        record.update(saved)
