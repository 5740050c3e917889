"""Floating-point operations of a forward pass, a backward pass and one decoded token.

A multiply-add counts 2, so y = x W^T with x (N, n_in) and W (n_out, n_in) costs 2·N·n_in·n_out. Only matrix products
are counted: norms, activations, softmax and the embedding look-up are O(D) per token beside O(D²) and belong to memory
traffic. The pass described ends in logits; the pooler (2·B·D²) is not on that path.

A backward pass costs twice the forward one, since every product y = x W^T asks for dx = dy W and dW = dy^T x, and
scores and pattern·v likewise have two operands each. There is no exception for the first block as long as the token
table is trained, because then its input needs a gradient too; with a frozen table the first q, k and v save their dx.
Fused kernels that recompute the scores in the backward pass add one more product; it is not counted.
"""

import math
from dataclasses import dataclass
from typing import assert_never

from glassformer.config import Dense, EncoderConfig, Gated, ModelConfig, MoE, NoFeedForward, Seq2SeqConfig
from glassformer.sizing.parameters import active, expert_count, parameters, stacks

DEFAULT_CONTEXT = 512
"""Tokens assumed when neither the caller nor the config's max_len says how many: T5's training length."""


@dataclass(frozen=True)
class Flops:
    """Operations of one pass over `batch` sequences, by part; see the module for what is counted."""

    batch: int
    context: int
    """T, tokens of a sequence (of the target, in an encoder-decoder)."""
    source: int
    """Tokens of the source in an encoder-decoder; 0 elsewhere."""
    forward: dict[str, int]
    """By part, with every score of the T·S square computed: what the products cost without a causal kernel."""
    needed: dict[str, int]
    """The same with only those scores that the causal mask and the window leave."""
    rule: int
    """6·N·D: N active parameters, D tokens; each stack with its own tokens in an encoder-decoder."""

    @property
    def total_forward(self) -> int:
        return sum(self.forward.values())

    @property
    def total_backward(self) -> int:
        return 2 * self.total_forward

    @property
    def training(self) -> int:
        """Forward and backward."""
        return self.total_forward + self.total_backward

    @property
    def training_needed(self) -> int:
        """Forward and backward with a kernel that skips masked scores."""
        return 3 * sum(self.needed.values())


def flops(config: ModelConfig, batch: int = 1, context: int | None = None, source: int | None = None) -> Flops:
    """Operations of one pass; `source` is the encoder's length in an encoder-decoder (None: as `context`)."""
    T, S = lengths(config, context, source)
    full, needed = _parts(config, batch, T, S, masked=False), _parts(config, batch, T, S, masked=True)
    return Flops(batch, T, S, full, needed, _rule(config, batch, T, S))


def decode_flops(config: ModelConfig, context: int | None = None, source: int | None = None) -> dict[str, int]:
    """Operations for one token of one sequence when `context` tokens (itself included) stand in the cache.

    Projections, feed-forward and head as for any token; scores and pattern·v 2·H·(K + U)·min(S, W) in each block. The
    encoder and cross-attention's keys and values were computed once, before, and are not counted.
    """
    _refuse_encoder(config)
    T, S = lengths(config, context, source)
    H, K, U = config.n_heads, config.d_head, config.d_value
    L = config.n_layers
    seen = sum(min(T, config.window(layer) or T) for layer in range(L))
    parts = {
        "projections": 2 * L * _projection_weights(config),
        "scores": 2 * H * K * seen,
        "mix": 2 * H * U * seen,
        "feedforward": 2 * L * _feedforward_weights(config),
        "head": 2 * _head_weights(config),
    }
    if S:
        parts["cross_projections"] = 2 * L * config.d_model * H * (K + U)  # q and o; k and v are cached
        parts["cross_scores"] = 2 * L * H * (K + U) * S
    return parts


def lengths(config: ModelConfig, context: int | None, source: int | None) -> tuple[int, int]:
    """(T, S) with defaults filled in and checked; S is 0 without a cross-attention."""
    T = context if context is not None else config.max_len or DEFAULT_CONTEXT
    if T < 1:
        raise ValueError(f"context={T} must be at least 1 token.")
    if not isinstance(config, Seq2SeqConfig):
        if source:
            raise ValueError(f"source={source} is a length of an encoder-decoder, but this model is a {config.kind}.")  # type: ignore[attr-defined]
        return T, 0
    S = T if source is None else source
    if S < 1:
        raise ValueError(f"source={S} must be at least 1 token.")
    return T, S


def beyond(config: ModelConfig, T: int, S: int = 0) -> str | None:
    """One sentence where a sequence is longer than the model's context, so that it cannot run as counted; else None."""
    limit, longest = config.max_len, max(T, S)
    if limit is None or longest <= limit:
        return None
    if config.learned_positions is not None:
        return f"{longest:,} tokens cannot run: the learned position table has {limit:,} rows, one for each token."
    return f"{longest:,} tokens are beyond the context of {limit:,} the model was made for: `generate` refuses them."


def seen_pairs(T: int, window: int | None, causal: bool) -> int:
    """(query, key) pairs that a self-attention over T tokens may use.

    Causal T(T+1)/2, both ways T²; with a window W < T: causal W(W+1)/2 + (T-W)·W, both ways T(2W-1) - W(W-1).
    """
    W = min(window or T, T)
    return W * (W + 1) // 2 + (T - W) * W if causal else T * (2 * W - 1) - W * (W - 1)


def _parts(config: ModelConfig, batch: int, T: int, S: int, masked: bool) -> dict[str, int]:
    D, H, G, K, U = config.d_model, config.n_heads, config.n_kv_heads, config.d_head, config.d_value
    parts = dict.fromkeys(("projections", "scores", "mix", "feedforward", "head"), 0)
    for stack, n_blocks in stacks(config).items():
        length = S if stack == "encoder" and S else T
        tokens = batch * length
        pairs = n_blocks * length**2
        if masked:
            windows = [config.window(layer) for layer in range(n_blocks)]
            pairs = sum(seen_pairs(length, W, causal=stack == "decoder") for W in windows)
        parts["projections"] += 2 * tokens * n_blocks * _projection_weights(config)
        parts["scores"] += 2 * batch * H * K * pairs
        parts["mix"] += 2 * batch * H * U * pairs
        parts["feedforward"] += 2 * tokens * n_blocks * _feedforward_weights(config)
    parts["head"] = 2 * batch * T * _head_weights(config)
    if S:
        reads, memory = D * H * (K + U), D * G * (K + U)  # q and o of the target; k and v of the source
        parts["cross_projections"] = 2 * batch * config.n_layers * (T * reads + S * memory)
        parts["cross_scores"] = 2 * batch * config.n_layers * H * (K + U) * T * S
    return parts


def _projection_weights(config: ModelConfig) -> int:
    """D·(H·K + G·K + G·U + H·U): q, k, v and o of one block."""
    H, G, K, U = config.n_heads, config.n_kv_heads, config.d_head, config.d_value
    return config.d_model * (H * K + G * K + G * U + H * U)


def _feedforward_weights(config: ModelConfig) -> int:
    """2·D·F, 3·D·F gated; times A plus the router's D·E with experts; 0 without a feed-forward."""
    match config.feedforward:
        case NoFeedForward():
            return 0
        case Dense(d_ff=width):
            return 2 * config.d_model * width
        case Gated(d_ff=width):
            return 3 * config.d_model * width
        case MoE(n_experts=E, n_active=A, expert=expert):
            weights = (3 if isinstance(expert, Gated) else 2) * config.d_model * expert.d_ff
            return A * weights + config.d_model * E
        case _:
            assert_never(config.feedforward)


def _head_weights(config: ModelConfig) -> int:
    """D·V, and D² for a transform; a tied head multiplies like any other."""
    if config.head is None:
        return 0
    return config.d_model * config.vocab_size + (config.d_model**2 if config.head.transform is not None else 0)


def _rule(config: ModelConfig, batch: int, T: int, S: int) -> int:
    if not S:
        return 6 * active(config) * batch * T
    names = parameters(config)
    encoder = sum(math.prod(shape) for name, shape in names.items() if name.startswith("encoder."))
    if isinstance(config.feedforward, MoE):
        idle = config.feedforward.n_experts - config.feedforward.n_active
        encoder -= stacks(config)["encoder"] * idle * expert_count(config)
    return 6 * batch * (encoder * S + (active(config) - encoder) * T)


def _refuse_encoder(config: ModelConfig) -> None:
    if isinstance(config, EncoderConfig):
        raise ValueError("an encoder decodes nothing: it has no next token. Ask for the forward pass, flops(config).")
