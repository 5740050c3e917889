"""Floating-point operations (FLOPs) of a forward pass, of a backward pass and of one decoded token.

A multiply-add counts as 2 FLOPs, so y = x W^T with x (N, n_in) and W (n_out, n_in) costs 2·N·n_in·n_out. Only matmuls
are counted: norms, activations, softmax and the embedding lookup cost O(D) per token, compared with O(D²), and are
limited by memory bandwidth. The forward pass ends in logits; the pooler (2·B·D²) is not part of it.

A backward pass costs twice the forward pass: the matmul y = x W^T requires dx = dy W and dW = dy^T x, and the two
operands of scores and of pattern·v need gradients in the same way. The first block is no exception as long as the token
table is trained, because then its input needs a gradient too. With a frozen table the first q, k and v need no dx.
Fused kernels that recompute the scores in the backward pass need one more matmul, which is not counted.
"""

import math
from dataclasses import dataclass

from glassformer.config import EncoderConfig, ModelConfig, Seq2SeqConfig
from glassformer.sizing.formulas import flop_formulas
from glassformer.sizing.parameters import active, idle, parameters, stacks

DEFAULT_CONTEXT = 512
"""Tokens per sequence if neither the caller nor the config (max_len) gives a length: the training length of T5."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of one pass over `batch` sequences, by part. The module docstring defines what is counted."""

    batch: int
    context: int
    """T, tokens per sequence (in an encoder-decoder: of the target)."""
    source: int
    """Tokens per source sequence in an encoder-decoder, otherwise 0."""
    forward: dict[str, int]
    """FLOPs by part if all T·S scores are computed, masked ones included."""
    needed: dict[str, int]
    """FLOPs by part if only the scores are computed that the causal mask and the window allow."""
    rule: int
    """6·N·D for N active parameters and D tokens. In an encoder-decoder each stack has its own number of tokens."""

    @property
    def total_forward(self) -> int:
        return sum(self.forward.values())

    @property
    def total_backward(self) -> int:
        return 2 * self.total_forward

    @property
    def training(self) -> int:
        """FLOPs of forward and backward pass."""
        return self.total_forward + self.total_backward

    @property
    def training_needed(self) -> int:
        """FLOPs of forward and backward pass with a kernel that skips masked scores."""
        return 3 * sum(self.needed.values())


def flops(config: ModelConfig, batch: int = 1, context: int | None = None, source: int | None = None) -> Flops:
    """Return the FLOPs of one pass.

    `source` is the length of the encoder input in an encoder-decoder. Default: the same as `context`.
    """
    T, S = lengths(config, context, source)
    forward = {part: found.total for part, found in flop_formulas(config, batch, T, S).items()}
    pairs = sum(
        attended_pairs(S if stack == "encoder" and S else T, config.window(layer), causal=stack == "decoder")
        for stack, n_layers in stacks(config).items()
        for layer in range(n_layers)
    )
    scores = 2 * batch * config.n_heads * pairs
    needed = forward | {"scores": scores * config.d_head, "mix": scores * config.d_value}
    return Flops(batch, T, S, forward, needed, _rule(config, batch, T, S))


def decode_flops(config: ModelConfig, context: int | None = None, source: int | None = None) -> dict[str, int]:
    """Return the FLOPs of decoding one token of one sequence with `context` tokens (including itself) in the KV cache.

    Projections, feed-forward and head cost the same as for any token; scores and pattern·v cost 2·H·(K + U)·min(S, W)
    in each block. The encoder and the keys and values of cross-attention are computed once per sequence and are not
    counted.
    """
    _refuse_encoder(config)
    T, S = lengths(config, context, source)
    H, keys, values = config.n_heads, config.d_head, config.d_value
    if (latent := config.attention.latent) is not None:
        # the absorbed form: keys and values of all heads are the cached vectors
        keys, values = latent.d_shared + latent.kv_rank, latent.kv_rank
    seen = sum(min(T, config.window(layer) or T) for layer in range(config.n_layers))
    # one token, and none of the source, whose keys and values are cached
    parts = {part: found.total for part, found in flop_formulas(config, 1, 1, 0).items()}
    parts |= {"scores": 2 * H * keys * seen, "mix": 2 * H * values * seen}
    if S:
        parts["cross_scores"] = 2 * config.n_layers * H * (config.d_head + config.d_value) * S
    return parts


def lengths(config: ModelConfig, context: int | None, source: int | None) -> tuple[int, int]:
    """Return (T, S) with defaults filled in, after validation. S is 0 if the model has no cross-attention."""
    T = context if context is not None else config.max_len or DEFAULT_CONTEXT
    if T < 1:
        raise ValueError(f"context={T} must be at least 1 token.")
    if not isinstance(config, Seq2SeqConfig):
        if source:
            kind = config.kind  # type: ignore[attr-defined]
            raise ValueError(f"source={source} is for an encoder-decoder, but this model is a {kind}: leave it out.")
        return T, 0
    S = T if source is None else source
    if S < 1:
        raise ValueError(f"source={S} must be at least 1 token.")
    return T, S


def too_long(config: ModelConfig, T: int, S: int = 0) -> str | None:
    """Return one sentence if the sequence is longer than the model supports, so that it cannot run; otherwise None."""
    limit, longest = config.max_len, max(T, S)
    if limit is None or longest <= limit:
        return None
    if config.learned_positions is not None:
        return f"{longest:,} tokens cannot run: the learned position table has only {limit:,} positions."
    return f"{longest:,} tokens exceed the model's maximum context of {limit:,}: `generate` rejects them."


def attended_pairs(T: int, window: int | None, causal: bool) -> int:
    """Return the number of (query, key) pairs that the mask of a self-attention over T tokens allows.

    causal          T(T+1)/2     with a window W < T:  W(W+1)/2 + (T-W)·W
    bidirectional   T²           with a window W < T:  T(2W-1) - W(W-1)
    """
    W = min(window or T, T)
    return W * (W + 1) // 2 + (T - W) * W if causal else T * (2 * W - 1) - W * (W - 1)


def _rule(config: ModelConfig, batch: int, T: int, S: int) -> int:
    if not S:
        return 6 * active(config) * batch * T
    names = parameters(config)
    encoder = sum(math.prod(shape) for name, shape in names.items() if name.startswith("encoder."))
    encoder -= idle(config, stacks(config)["encoder"])
    return 6 * batch * (encoder * S + (active(config) - encoder) * T)


def _refuse_encoder(config: ModelConfig) -> None:
    if isinstance(config, EncoderConfig):
        raise ValueError("an encoder does not decode tokens: use flops(config) for its forward pass.")
