"""Bytes that autograd saves for the backward pass, tensor by tensor.

The counts describe `glassformer.model` in eager mode on the CPU. Each term names the operation that saves the tensor. A
tensor that two operations save counts once. Torch computes attention in one of two ways:

* fused (`_scaled_dot_product_flash_attention_for_cpu`): it saves q, k, v, the output and one logsumexp per query, but
  not the attention pattern;
* math (`_scaled_dot_product_attention_math`): it also saves the pattern, in float32 even for half-precision inputs.
  Torch uses it with dropout on the pattern, with a trained bias (T5), and if K and U differ.

On a GPU the fused kernels save the same tensors. Dropout saves one byte per entry there, and one float per entry here.
"""

import dataclasses
from dataclasses import dataclass

from glassformer.config import (
    Dense,
    FeedForward,
    Gated,
    LayerNorm,
    ModelConfig,
    MoE,
    NoFeedForward,
    QueryKeyPosition,
    RMSNorm,
    Rotary,
)
from glassformer.config.choices import Recompute


@dataclass(frozen=True)
class Pass:
    """One forward pass of a stack: `batch` sequences of `length` tokens, with `width` bytes per number.

    `memory` is the number of source tokens that the cross-attention reads. Under autocast `width` is the width of the
    matmul inputs, and the residual stream has its own width.
    """

    config: ModelConfig
    batch: int
    length: int
    width: int
    causal: bool
    memory: int = 0
    training: bool = True
    residual_width: int = 0
    """Bytes per number of the residual stream, which the norms read. 0 means the same as `width`."""
    layer: int = 0
    """Index of the block that is being counted, which may have a position scheme and a feed-forward of its own."""

    @property
    def norm_width(self) -> int:
        return self.residual_width or self.width

    @property
    def uses_autocast(self) -> bool:
        """True if autocast casts the inputs of the matmuls, because the residual stream is wider."""
        return self.norm_width != self.width

    @property
    def residual(self) -> int:
        """Bytes of one copy of the residual stream between the blocks."""
        return self.tokens * self.config.d_model * self.norm_width

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def hidden_states(self) -> int:
        """Bytes of one (B,T,D) tensor in the dtype of the matmuls."""
        return self.tokens * self.config.d_model * self.width

    @property
    def upcast_width(self) -> int:
        """Bytes per number in operations that upcast half precision to float32: softmax, RMSNorm, logsumexp."""
        return max(self.width, 4)

    @property
    def has_dropout(self) -> bool:
        return self.training and self.config.dropout > 0

    def materializes_pattern(self, cross: bool) -> bool:
        """True if torch computes the attention pattern as a tensor (the math path of the module docstring)."""
        trains_bias = self.training and self.config.trained_bias is not None and not cross
        return self.has_dropout or trains_bias or self.config.d_head != self.config.d_value

    @property
    def is_explicit(self) -> bool:
        """True if the model computes scores and pattern itself, because torch's kernel has no cap and no sinks."""
        return self.config.attention.softcap is not None or self.config.attention.sinks

    @property
    def has_qk_norm_by_head(self) -> bool:
        """True if queries and keys are normed head by head, which leaves them contiguous."""
        return self.config.attention.qk_norm is not None and self.config.attention.qk_norm_over != "all"

    def uses_rotary(self, cross: bool) -> bool:
        return isinstance(self.config.layer_position(self.layer), Rotary) and not cross

    def uses_qk_position(self, cross: bool) -> bool:
        return isinstance(self.config.position, QueryKeyPosition) and not cross

    @property
    def feedforward(self) -> FeedForward:
        """The feed-forward layer of the block."""
        return self.config.layer_feedforward(self.layer)

    @property
    def has_feedforward(self) -> bool:
        """True if the block has a feed-forward layer."""
        return not isinstance(self.feedforward, NoFeedForward)

    def at(self, layer: int) -> "Pass":
        """Return the same pass, at one block."""
        return dataclasses.replace(self, layer=layer)

    def has_window_mask(self, layer: int) -> bool:
        """True if the layer has a boolean (T, T) mask: its window is shorter than the sequence."""
        window = self.config.window(layer)
        return window is not None and window < self.length


def saved_by_norm(norm: LayerNorm | RMSNorm, rows: int, n: int, width: int, heads: int = 0) -> int:
    """Return the bytes of the input and the statistics of a norm over `rows` vectors of `n` numbers.

    The output is counted by the operation that reads it. With `heads`, each head has a weight of its own, which is
    multiplied afterwards.
    """
    upcast = max(width, 4)
    total = (
        n * (width if isinstance(norm, LayerNorm) else upcast) if norm.offset and not heads else 0
    )  # offset + weight
    if heads:
        total += (rows * n + heads * n) * width  # the factors: the normalized vectors, and offset + weight
    if isinstance(norm, LayerNorm):
        return total + rows * n * width + 2 * rows * width  # native_layer_norm: input; mean and 1/std of each vector
    # rms_norm: input (upcast), x/rms before the weight; 1/rms
    return total + (2 if norm.weight and not heads else 1) * rows * n * upcast + rows * upcast


def saved_by_activation(activation: str, n: int) -> int:
    """Return how many of the n numbers an activation function saves, apart from the input of the down projection."""
    if activation in ("relu", "tanh"):
        return 0  # their backward reads the output, which the down projection saves anyway
    return 2 * n if activation == "quick_gelu" else n  # gelu, silu: the input; relu2: the output of relu


def saved_by_expert(expert: Dense | Gated, n: int) -> int:
    """Return how many numbers a feed-forward layer saves for n hidden numbers (tokens times F), without its input."""
    if isinstance(expert, Gated):
        limited = 2 * n if expert.limit is not None else 0  # clamp: its input, for gate and up
        # the activation; both factors (its output and the output of up); their elementwise product, read by down
        return saved_by_activation(expert.activation, n) + 3 * n + limited
    return saved_by_activation(expert.activation, n) + n  # the activation; its output, read by down


def saved_by_feedforward(run: Pass) -> int:
    """Return the bytes that the feed-forward layer of one block saves, including its input."""
    ff, D, N = run.feedforward, run.config.d_model, run.tokens
    if isinstance(ff, NoFeedForward):
        return 0
    if not isinstance(ff, MoE):
        inputs = 1 + (run.uses_autocast and isinstance(ff, Gated))  # of up and gate: autocast casts it for each
        return inputs * run.hidden_states + saved_by_expert(ff, N * ff.d_ff) * run.width
    E, routed = ff.n_experts, N * ff.n_active
    router = N * E * run.upcast_width + N * E * 8  # softmax: its output; sort: the order
    if ff.normalize:
        gathers = ff.router.correction or ff.router.groups > 1  # then the choice is not made by sorting the scores
        kept = ff.n_active if gathers else E
        router += N * kept * run.upcast_width + N * run.upcast_width  # division: (sorted) probabilities and their sum
    rows = 3 * routed * D  # gathered expert inputs; expert outputs; expert outputs times gate, added by index_add
    hidden = saved_by_expert(ff.expert, routed * ff.expert.d_ff)
    # the last two terms: the gates, and two int64 indices (token, slot) for each routed token
    total = run.hidden_states + router + (rows + hidden + routed) * run.width + 16 * routed
    if ff.shared is not None:
        total += saved_by_expert(ff.shared, N * ff.shared.d_ff) * run.width
        total += (N + N * D) * run.width if ff.shared_gate else 0  # the gate, and what it multiplies
    return total


def saved_by_attention(run: Pass, cross: bool = False) -> int:
    """Return the bytes that an attention layer saves, from the input of q, k, v to the input of o.

    The memory of a cross-attention is not included, because all layers share it.
    """
    cfg, B, T, w = run.config, run.batch, run.length, run.width
    S = run.memory if cross else T
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    total = run.hidden_states  # the input of q (and of k and v)
    if run.uses_qk_position(cross):
        total += run.hidden_states  # v has another input than q and k
    if run.uses_autocast and not cross:  # autocast casts the input for q, k and v separately
        total += run.hidden_states * (2 - run.uses_qk_position(cross))
    total += _saved_by_projections(run, S)
    heads = B * T * H * U * w
    if run.is_explicit:
        return total + heads + _saved_by_explicit_attention(run, S)
    if run.materializes_pattern(cross):
        wide = run.upcast_width  # half precision is upcast before the matmuls
        total += (B * H * T * K + B * H * S * K + B * H * S * U) * wide  # matmuls: q, and k and v repeated to H heads
        # softmax: the pattern; dropout: its mask, and the pattern times the mask
        total += (3 if run.has_dropout else 1) * B * H * T * S * wide
        return total + heads  # the joined heads, read by o
    G = cfg.n_heads if cfg.attention.latent is not None else G
    total += (B * T * H * K + B * S * G * K + B * S * G * U) * w + heads  # fused kernel: q, k, v and its output
    total += B * H * T * run.upcast_width  # fused kernel: logsumexp of the scores of each query
    if (run.uses_rotary(cross) or run.has_qk_norm_by_head) and H > 1 and T > 1:
        total += heads  # q is contiguous, hence the output too, and joining the heads for o copies it
    return total


def _saved_by_projections(run: Pass, S: int) -> int:
    """Return what norms and clamps of queries, keys and values save, and the low-rank vectors of latent attention."""
    cfg, B, T, w = run.config, run.batch, run.length, run.width
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    attention, total = cfg.attention, 0
    if attention.qk_norm is not None:
        for rows, n in ((B * T, H), (B * S, G)):
            if attention.qk_norm_over == "all":
                total += saved_by_norm(attention.qk_norm, rows, n * K, w)
            else:
                own = n if attention.qk_norm_over == "heads" else 0
                total += saved_by_norm(attention.qk_norm, rows * n, K, w, own)
    if attention.clip is not None:
        total += (B * T * H * K + B * S * G * (K + U)) * w  # clamp: its input
    if (latent := attention.latent) is not None:
        for rows, rank in ((B * S, latent.kv_rank), (B * T, latent.q_rank or 0)):
            if rank:  # the norm, and its output, read by k and v, or by q
                total += saved_by_norm(latent.norm, rows, rank, w) + rows * rank * w
    return total


def _saved_by_explicit_attention(run: Pass, S: int) -> int:
    """Return what attention saves if the model computes it line by line, without its input and the joined heads."""
    cfg, B, T, w, wide = run.config, run.batch, run.length, run.width, run.upcast_width
    H, K, U = cfg.n_heads, cfg.d_head, cfg.d_value
    scores = B * H * T * S
    total = (B * H * T * K + B * H * S * (K + U)) * w  # matmuls: q, and k and v repeated to H heads
    if cfg.attention.softcap is not None:
        total += scores * w  # tanh: its output
    total += (scores + B * H * T * cfg.attention.sinks) * wide  # softmax: its output, with the column of the sinks
    if run.has_dropout:
        total += 2 * scores * w  # its mask, and the pattern times the mask
    elif wide != w:
        total += scores * w  # the pattern in half precision
    return total


def saved_by_mask(run: Pass, layer: int) -> int:
    """Return the bytes of masks and score biases that the self-attention of one block saves.

    A masked score bias is computed once for each window size. It counts for the first block that reads it.
    """
    cfg, square = run.config, run.length**2
    if run.is_explicit and not cfg.biases_scores:
        return square if run.causal or run.has_window_mask(layer) else 0  # masked_fill: the boolean mask
    first = all(cfg.window(earlier) != cfg.window(layer) for earlier in range(layer))
    if cfg.trained_bias is not None:
        masked = run.causal or run.has_window_mask(layer)
        return square if first and masked else 0  # masked_fill: the boolean mask
    if cfg.biases_scores:
        fused = not run.materializes_pattern(cross=False) and not run.is_explicit
        return cfg.n_heads * square * run.width if fused and first else 0  # fused kernel: its additive mask
    if run.has_window_mask(layer) and not run.materializes_pattern(cross=False):
        return square * run.width  # fused kernel: the mask in additive form
    return 0


def saved_between(run: Pass, layer: int) -> int:
    """Return the bytes that one block saves between its branches: norms, and the dropout mask of each branch."""
    cfg, run = run.config, run.at(layer)
    branches = 1 + run.has_feedforward + bool(run.memory)
    norms = 1 if cfg.placement == "parallel" else branches * (1 + (cfg.placement == "sandwich"))
    norms -= not cfg.has_attention_norm(layer)
    total = norms * saved_by_norm(cfg.norm, run.tokens, cfg.d_model, run.norm_width)
    return total + branches * run.hidden_states * run.has_dropout


def saved_by_block(run: Pass, layer: int) -> int:
    """Return the bytes that one block saves: norms, branches and dropout masks."""
    total, cfg, run = saved_between(run, layer), run.config, run.at(layer)
    total += saved_by_attention(run) + saved_by_mask(run, layer) + saved_by_feedforward(run)
    if run.memory:
        total += saved_by_attention(run, cross=True)
    if cfg.placement == "parallel":
        total -= run.hidden_states  # both branches read the output of the same norm
    if cfg.placement == "parallel_two" and (isinstance(cfg.norm, LayerNorm) or run.norm_width >= 4):
        total -= run.residual  # both norms read the residual stream; rms_norm upcasts half precision for each
    return total


def kept_by_block(run: Pass, layer: int, recompute: Recompute) -> int | None:
    """Return the bytes that a block keeps until its backward pass, where it is computed again; None if it is not.

    Both kinds keep the input of the block. `selective` also keeps the results of matmuls and of fused attention.
    """
    if recompute == "no":
        return None
    if recompute == "full":
        return run.residual
    run = run.at(layer)
    total = run.residual + _matmuls_of_attention(run) + _matmuls_of_feedforward(run.feedforward, run.tokens, run)
    return total + (_matmuls_of_attention(run, cross=True) if run.memory else 0)


def _matmuls_of_attention(run: Pass, cross: bool = False) -> int:
    """Return the bytes of the results of q, k, v, o, and of attention itself."""
    cfg, B, T, N = run.config, run.batch, run.length, run.tokens
    S = run.memory if cross else T
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    total = (N * H * K + B * S * G * (K + U) + N * cfg.d_model) * run.width
    if run.materializes_pattern(cross) or run.is_explicit:
        return total + B * H * T * (S + U) * run.upcast_width  # scores, and the pattern times v
    return total + N * H * U * run.width + B * H * T * run.upcast_width  # its output and its logsumexp


def _matmuls_of_feedforward(ff: FeedForward, rows: int, run: Pass) -> int:
    match ff:
        case NoFeedForward():
            return 0
        case MoE():
            router = rows * ff.n_experts * run.width
            return router + _matmuls_of_feedforward(ff.expert, rows * ff.n_active, run)
        case _:
            hidden = (2 if isinstance(ff, Gated) else 1) * ff.d_ff
            return rows * (hidden + run.config.d_model) * run.width


def saved_before_blocks(run: Pass) -> int:
    """Return the bytes that a stack saves before its first block: positions, embedding norm, projection, dropout."""
    cfg, total = run.config, run.hidden_states * run.has_dropout
    if cfg.learned_positions is not None:
        total += 8 * run.length  # embedding lookup: the position ids
    for position in {cfg.layer_position(layer) for layer in range(cfg.n_layers)}:
        if isinstance(position, Rotary):
            total += run.length * position.rotated(cfg.d_head) * run.width  # cos and sin, shared by the blocks
    if cfg.trained_bias is not None:
        total += 8 * run.length**2  # embedding lookup: the bucket of each (query, key) pair
    if cfg.embedding.norm:
        total += saved_by_norm(cfg.norm, run.tokens, cfg.position_width, run.norm_width)
    if cfg.embedding.width is not None:
        total += run.tokens * cfg.embedding.width * run.width  # the input of the projection to D
    if cfg.embedding.n_segments:
        total += 8 * run.tokens  # embedding lookup: the segment ids
    return total


def saved_after_blocks(run: Pass) -> int:
    """Return the bytes that a stack saves after its last block: the final norm and the output of the stack.

    The output is read by the head, or by k and v of every cross-attention.
    """
    cfg = run.config
    final = saved_by_norm(cfg.norm, run.tokens, cfg.d_model, run.norm_width) if cfg.placement != "post" else 0
    before_cast = run.residual * run.uses_autocast  # autocast also saves the output before the cast
    return final + run.hidden_states + before_cast


def saved_by_head(run: Pass) -> int:
    """Return the bytes that head and loss save. The input of the head is counted by `saved_after_blocks`."""
    cfg, total = run.config, 0
    if cfg.head is None:
        return 0
    numbers = run.tokens * cfg.head_width
    if cfg.head.has_transform:
        total += numbers * run.width  # the output of the transform (and of its norm), read by the output matrix
    if cfg.head.transform is not None:
        total += saved_by_activation(cfg.head.transform, numbers * run.width)
        if cfg.head.transform in ("relu", "tanh") and isinstance(cfg.norm, RMSNorm) and run.norm_width < 4:
            total += numbers * run.width  # their output: the norm after them saves an upcast copy of it instead
        total += saved_by_norm(cfg.norm, run.tokens, cfg.head_width, run.norm_width)
    if cfg.head.softcap is not None:
        total += run.tokens * cfg.vocab_size * run.width  # tanh: its output
    return total + run.tokens * cfg.vocab_size * run.width  # log-softmax: its output
