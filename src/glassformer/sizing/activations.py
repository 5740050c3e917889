"""Bytes that autograd keeps for the backward pass, tensor by tensor.

The accounting is that of the engine in `glassformer.model` run eagerly on the CPU. Each term names the operation that
saves it; a tensor saved by two operations is one tensor and counts once. Attention goes one of two ways, as torch
chooses:

* fused (`_scaled_dot_product_flash_attention_for_cpu`): q, k, v, the output and one number per row, never the pattern;
* written out (`_scaled_dot_product_attention_math`): the pattern too, in float32 even for half-precision inputs. Torch
  takes this way when dropout falls on the pattern, when a bias has to be trained (T5) and when K and U differ.

On a GPU the fused kernels keep the same tensors; dropout keeps a byte per entry there, and a whole number here.
"""

from dataclasses import dataclass
from typing import assert_never

from glassformer.config import (
    Alibi,
    Dense,
    Gated,
    LayerNorm,
    ModelConfig,
    MoE,
    NoFeedForward,
    QueryKeyPosition,
    RMSNorm,
    Rotary,
    T5Bias,
)


@dataclass(frozen=True)
class Pass:
    """One stack's work: `batch` sequences of `length` tokens, numbers of `width` bytes, `memory` tokens to cross to.

    Under autocast `width` is that of the matmuls, and the residual stream has its own width.
    """

    config: ModelConfig
    batch: int
    length: int
    width: int
    causal: bool
    memory: int = 0
    training: bool = True
    residual_width: int = 0
    """Bytes of a number of the residual stream, which the norms read. 0: `width`."""

    @property
    def norm_width(self) -> int:
        return self.residual_width or self.width

    @property
    def casts(self) -> bool:
        """True if autocast casts what the matmuls read, because the residual stream is wider."""
        return self.norm_width != self.width

    @property
    def residual(self) -> int:
        """Bytes of one copy of the residual stream between the blocks."""
        return self.tokens * self.config.d_model * self.norm_width

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def stream(self) -> int:
        """N·D numbers as a matmul reads them: one copy of the residual stream."""
        return self.tokens * self.config.d_model * self.width

    @property
    def exact(self) -> int:
        """Bytes of a number where half precision is widened: softmax, RMSNorm, row sums."""
        return max(self.width, 4)

    @property
    def drops(self) -> bool:
        return self.training and self.config.dropout > 0

    def written_out(self, cross: bool) -> bool:
        """Whether torch computes the pattern as a tensor; see the module."""
        scheme = self.config.position
        trains_bias = self.training and scheme.biases_scores and bool(scheme.table(self.config)) and not cross
        return self.drops or trains_bias or self.config.d_head != self.config.d_value

    def rotates(self, cross: bool) -> bool:
        return isinstance(self.config.position, Rotary) and not cross

    def infuses(self, cross: bool) -> bool:
        return isinstance(self.config.position, QueryKeyPosition) and not cross

    @property
    def feeds(self) -> bool:
        """Whether a block has a feed-forward."""
        return not isinstance(self.config.feedforward, NoFeedForward)

    def masked(self, layer: int) -> bool:
        """Whether a boolean (T, T) mask exists: a window shorter than the sequence."""
        window = self.config.window(layer)
        return window is not None and window < self.length


def saved_by_norm(norm: LayerNorm | RMSNorm, rows: int, n: int, width: int) -> int:
    """Input and statistics of a norm over `rows` rows of `n` numbers; the output is counted by whoever reads it."""
    match norm:
        case LayerNorm():
            return rows * n * width + 2 * rows * width  # native_layer_norm: its input; mean and 1/deviation per row
        case RMSNorm():
            exact = max(width, 4)
            return 2 * rows * n * exact + rows * exact  # its input (widened), x/rms before the weight; 1/rms per row
        case _:
            assert_never(norm)


def saved_by_activation(activation: str, n: int) -> int:
    """What stands between the up projection and the down projection's input, beyond that input; n numbers each."""
    if activation in ("relu", "tanh"):
        return 0  # their backward reads the output, which is the down projection's input anyway
    return n  # gelu, silu: the input; relu2: relu's output


def saved_by_expert(expert: Dense | Gated, n: int) -> int:
    """Numbers saved by a feed-forward over n hidden numbers (rows times F), its input excluded."""
    match expert:
        case Gated():
            # the activation; its output and up's, the two factors; the product, read by down
            return saved_by_activation(expert.activation, n) + 3 * n
        case Dense():
            return saved_by_activation(expert.activation, n) + n  # the activation; its output, read by down
        case _:
            assert_never(expert)


def saved_by_feedforward(run: Pass) -> int:
    ff, D, N = run.config.feedforward, run.config.d_model, run.tokens
    if isinstance(ff, NoFeedForward):
        return 0
    if not isinstance(ff, MoE):
        inputs = 1 + (run.casts and isinstance(ff, Gated))  # of up (and gate); autocast casts it for each
        return inputs * run.stream + saved_by_expert(ff, N * ff.d_ff) * run.width  # and the inside
    E, visits = ff.n_experts, N * ff.n_active
    router = N * E * run.exact + N * E * 8  # softmax: its output; sort: the order
    if ff.normalize:
        router += N * E * run.exact + N * run.exact  # division: the sorted probabilities and their sum
    rows = 3 * visits * D  # an expert's input, gathered; its output, a factor; the product, added by index_add
    inside = saved_by_expert(ff.expert, visits * ff.expert.d_ff)
    return run.stream + router + (rows + inside + visits) * run.width + 16 * visits  # gates; (token, slot) pairs


def saved_by_attention(run: Pass, cross: bool = False) -> int:
    """From the projections' input to the input of `o`; for a cross-attention without the memory, which all share."""
    cfg, B, T, w = run.config, run.batch, run.length, run.width
    S = run.memory if cross else T
    H, G, K, U = cfg.n_heads, cfg.n_kv_heads, cfg.d_head, cfg.d_value
    total = run.stream * (1 + run.infuses(cross))  # the input of q (and k, v); infused, v reads another than q and k
    if run.casts:
        total += run.stream * (0 if cross else 2 - run.infuses(cross))  # autocast casts the input of q, k and v each
    if cfg.attention.qk_norm is not None:
        total += saved_by_norm(cfg.attention.qk_norm, B * T * H, K, w)
        total += saved_by_norm(cfg.attention.qk_norm, B * S * G, K, w)
    heads = B * T * H * U * w
    if run.written_out(cross):
        wide = run.exact  # half precision is widened before the products
        total += (B * H * T * K + B * H * S * K + B * H * S * U) * wide  # the products: q, k, v, spread over all heads
        total += (3 if run.drops else 1) * B * H * T * S * wide  # softmax: the pattern; dropout: noise, and its product
        return total + heads  # the heads side by side, read by o
    total += (B * T * H * K + B * S * G * K + B * S * G * U) * w + heads  # the kernel: q, k, v and its output
    total += B * H * T * run.exact  # the kernel: logsumexp of each row of scores
    if (run.rotates(cross) or cfg.attention.qk_norm is not None) and H > 1 and T > 1:
        total += heads  # q came contiguous, so the output does, and setting heads side by side copies it for o
    return total


def saved_by_mask(run: Pass, layer: int) -> int:
    """What biases and masks a self-attention leaves behind in one block."""
    cfg, square = run.config, run.length**2
    match cfg.position:
        case Alibi():
            if run.written_out(cross=False):
                return 0
            own = run.causal or run.masked(layer)  # masked afresh in each block; else all blocks share one bias
            first = all(run.masked(earlier) for earlier in range(layer))
            return cfg.n_heads * square * run.width if own or first else 0  # the kernel: its additive mask
        case T5Bias():
            return square if run.causal or run.masked(layer) else 0  # masked_fill: the boolean mask
    if run.masked(layer) and not run.written_out(cross=False):
        return square * run.width  # the kernel: the mask, made additive
    return 0


def saved_by_block(run: Pass, layer: int) -> int:
    """One block: a norm's and a branch's tensors for each branch, and dropout's noise."""
    cfg = run.config
    branches = 1 + run.feeds + bool(run.memory)
    norms = 1 if cfg.placement == "parallel" else branches
    total = norms * saved_by_norm(cfg.norm, run.tokens, cfg.d_model, run.norm_width)
    total += saved_by_attention(run) + saved_by_mask(run, layer) + saved_by_feedforward(run)
    if run.memory:
        total += saved_by_attention(run, cross=True)
    if cfg.placement == "parallel":
        total -= run.stream  # both branches read the same normed stream
    return total + branches * run.stream * run.drops  # dropout on each branch: its noise


def saved_by_entry(run: Pass) -> int:
    """Of a stack, before its first block: positions, embedding norm, dropout."""
    cfg, total = run.config, run.stream * run.drops
    if cfg.learned_positions is not None:
        total += 8 * run.length  # embedding look-up: the rows
    match cfg.position:
        case Rotary() as rotary:
            total += run.length * rotary.rotated(cfg.d_head) * run.width  # cosines and sines, shared by the blocks
        case T5Bias():
            total += 8 * run.length**2  # embedding look-up: the bucket of each pair
    if cfg.embedding.norm:
        total += saved_by_norm(cfg.norm, run.tokens, cfg.d_model, run.norm_width)
    if cfg.embedding.n_segments:
        total += 8 * run.tokens  # embedding look-up: the segments
    return total


def saved_by_exit(run: Pass) -> int:
    """Of a stack, after its last block: the final norm, and what comes out, read by the head or by every cross k, v."""
    cfg = run.config
    final = saved_by_norm(cfg.norm, run.tokens, cfg.d_model, run.norm_width) if cfg.placement != "post" else 0
    return final + run.stream + run.residual * run.casts  # under autocast also before the cast


def saved_by_head(run: Pass) -> int:
    """From the stream to the loss; the stream itself is counted by `saved_by_exit`."""
    cfg, total = run.config, 0
    if cfg.head is None:
        return 0
    if cfg.head.transform is not None:
        total += saved_by_activation(cfg.head.transform, run.stream) + run.stream  # the activation; read by the output
        total += saved_by_norm(cfg.norm, run.tokens, cfg.d_model, run.norm_width)
    return total + run.tokens * cfg.vocab_size * run.width  # log-softmax: its output
