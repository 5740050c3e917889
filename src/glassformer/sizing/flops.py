"""Floating-point operations (FLOPs) of a forward pass, of a backward pass and of one decoded token.

A multiply-add counts as 2 FLOPs, so y = x W^T with x (N, n_in) and W (n_out, n_in) costs 2·N·n_in·n_out. Only matmuls
are counted: norms, activations, softmax and the embedding lookup cost O(D) per token, compared with O(D²), and are
limited by memory bandwidth. The forward pass ends in logits; the pooler (2·B·D²) is not part of it.

A backward pass costs twice the forward pass: the matmul y = x W^T requires dx = dy W and dW = dy^T x, and the two
operands of scores and of pattern·v need gradients in the same way. The first block is no exception as long as the token
table is trained, because then its input needs a gradient too. With a frozen table the first q, k and v need no dx.
Fused kernels that recompute the scores in the backward pass need one more matmul, which is not counted.

Counts are formulas in the letters of docs/shapes.md, with and without numbers substituted. A formula is a sum of terms.
A term is a coefficient and letters: (4, "D D") means 4·D². Widths are simplified where the model allows: H·K is written
D if they are equal, G is written H without grouped heads, and U is written K if values are as wide as keys.
"""

import math
from collections import Counter
from dataclasses import dataclass

from glassformer.config import (
    EncoderConfig,
    FeedForward,
    Gated,
    Latent,
    LayerNorm,
    ModelConfig,
    MoE,
    NoFeedForward,
    RMSNorm,
    Seq2SeqConfig,
)
from glassformer.sizing.parameters import active, idle, parameters, stacks

Term = tuple[int, str]
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_SUBSCRIPTS = "₁₂₃₄₅₆₇₈₉"
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


@dataclass(frozen=True)
class Formula:
    """A formula: `letters` = `numbers` = `value`, counted `times` times (once per block)."""

    letters: str
    numbers: str
    value: int
    times: int = 1

    @property
    def total(self) -> int:
        return self.value * self.times

    def __str__(self) -> str:
        if not self.letters:
            return ""
        text = f"{self.letters} = {self.numbers}"
        return text if self.times == 1 else f"{text} = {self.value:,} × {self.times} blocks"


def formula(values: dict[str, int], terms: list[Term], times: int = 1) -> Formula:
    """Return the formula of a sum of terms. Like terms are combined; terms with coefficient 0 are left out."""
    merged: dict[str, int] = {}
    for coefficient, names in terms:
        if coefficient:
            merged[names] = merged.get(names, 0) + coefficient
    total, letters, numbers = 0, [], []
    for names, coefficient in merged.items():
        powers = Counter(names.split())
        value = coefficient
        for name, power in powers.items():
            value *= values[name] ** power
        total += value
        head = [] if coefficient == 1 and powers else [f"{coefficient:,}"]
        letters.append("·".join(head + [name + _superscript(power) for name, power in powers.items()]))
        numbers.append("·".join(head + [f"{values[name]:,}{_superscript(power)}" for name, power in powers.items()]))
    return Formula(" + ".join(letters), " + ".join(numbers), total, times)


def _superscript(power: int) -> str:
    return "" if power == 1 else str(power).translate(_SUPERSCRIPTS)


def letters(config: ModelConfig, batch: int = 1, context: int = 1, source: int = 0) -> dict[str, int]:
    """Return the value of every letter. N is B·T tokens.

    With latent attention C and Q are the widths of the low-rank vectors, R and O those of the shared and of the own
    components of a key. Fₛ is the width of a shared expert. In an encoder-decoder the encoder has Lₑ layers and
    Nₑ = B·S tokens.
    """
    ff = config.feedforward
    values = {
        "B": batch,
        "T": context,
        "S": source,
        "N": batch * context,
        "Nₑ": batch * source,
        "D": config.d_model,
        "H": config.n_heads,
        "G": config.n_kv_heads,
        "K": config.d_head,
        "U": config.d_value,
        "F": config.d_ff,
        "L": config.n_layers,
        "V": config.vocab_size,
    }
    if isinstance(ff, MoE):
        values |= {"E": ff.n_experts, "A": ff.n_active}
        if ff.shared is not None:
            values["Fₛ"] = ff.shared.d_ff
    if (latent := config.attention.latent) is not None:
        values |= {"C": latent.kv_rank, "R": latent.d_shared, "Q": latent.q_rank or config.d_model}
        values["O"] = config.d_head - latent.d_shared
    if isinstance(config, Seq2SeqConfig):
        values["Lₑ"] = config.n_encoder_layers
    return values


def widths(config: ModelConfig) -> tuple[str, str, str, str]:
    """Return the output widths of q, k and v and the input width of o, as letters."""
    H, G, K, U = config.n_heads, config.n_kv_heads, config.d_head, config.d_value
    q = "D" if config.d_model == H * K else "H K"
    k = q if G == H else "G K"
    return q, k, k if U == K else ("H U" if G == H else "G U"), q if U == K else "H U"


def attention_terms(config: ModelConfig, bias: bool) -> list[Term]:
    """Return the terms of q, k, v and o of one block: the weights, and with `bias` also biases and norms of q and k."""
    if (latent := config.attention.latent) is not None:
        return _latent_terms(config, latent, bias)
    q, k, v, o = widths(config)
    terms = [(1, f"D {width}") for width in (q, k, v, o)]
    if bias:
        terms += [(int(config.attention.bias), width) for width in (q, k, v)] + [(int(config.out_bias), "D")]
        if (norm := config.attention.qk_norm) is not None:
            widths_ = ("K", "K") if config.attention.qk_norm_over == "head" else ("H K", "G K")
            terms += [(norm_parameters(norm), width) for width in widths_]
        terms.append((int(config.attention.sinks), "H"))
    return terms


def _latent_terms(config: ModelConfig, latent: Latent, bias: bool) -> list[Term]:
    low = latent.q_rank is not None
    terms = [(int(low), "D Q"), (1, "Q H K" if low else "D H K"), (1, "D C"), (1, "D R"), (1, "C H O"), (1, "C H U")]
    terms.append((1, "D H U"))
    if bias:
        down, per_norm = int(config.attention.bias), norm_parameters(latent.norm)
        terms += [(low * (down + per_norm), "Q"), (down + per_norm, "C"), (down, "R")]
        terms += [(int(config.out_bias), "D"), (int(config.attention.sinks), "H")]
    return terms


def feedforward_kinds(config: ModelConfig) -> list[tuple[FeedForward, str, int]]:
    """Return the different feed-forwards of the layers, with the subscript of their letters and the number of layers.

    The subscript is empty if all layers have the same feed-forward.
    """
    counts = Counter(config.layer_feedforward(layer) for n in stacks(config).values() for layer in range(n))
    return [(part, _SUBSCRIPTS[i] if len(counts) > 1 else "", n) for i, (part, n) in enumerate(counts.items())]


def kind_letters(part: FeedForward, subscript: str, layers: int) -> dict[str, int]:
    """Return the values of F, E and A of one kind of layers, and of L if there are several kinds."""
    expert = part.expert if isinstance(part, MoE) else part
    values = {"F": 0 if isinstance(expert, NoFeedForward) else expert.d_ff, "L": layers}
    if isinstance(part, MoE):
        values |= {"E": part.n_experts, "A": part.n_active, "Fₛ": 0 if part.shared is None else part.shared.d_ff}
    return {name + subscript: value for name, value in values.items()}


def with_subscript(terms: list[Term], subscript: str, prefix: str = "") -> list[Term]:
    """Return terms with a subscript at the letters that differ between kinds of layers."""
    marked = {name: name + subscript for name in ("F", "E", "A", "L", "Fₛ")}
    return [(n, " ".join(marked.get(letter, letter) for letter in f"{prefix} {names}".split())) for n, names in terms]


def of_shared(terms: list[Term]) -> list[Term]:
    """Return terms with the width of the shared expert in place of that of the others."""
    return [(n, " ".join("Fₛ" if name == "F" else name for name in names.split())) for n, names in terms]


def norm_parameters(norm: LayerNorm | RMSNorm) -> int:
    """Return the number of vectors that a norm has: a weight, a bias, both or none."""
    if not norm.weight:
        return 0
    return 2 if isinstance(norm, LayerNorm) and norm.bias else 1


def flop_formulas(config: ModelConfig, batch: int, context: int, source: int) -> dict[str, Formula]:
    """Return the formula of each part of a forward pass with all T·S scores computed."""
    values = letters(config, batch, context, source)
    values |= {"width": config.embedding_width, "output": config.head_width}
    both = isinstance(config, Seq2SeqConfig)
    blocks = ["Nₑ Lₑ", "N L"] if both else ["N L"]
    squares = ["S S Lₑ", "T T L"] if both else ["T T L"]
    U = "K" if config.d_value == config.d_head else "U"
    parts = {
        "projections": [(2 * n, f"{b} {w}") for b in blocks for n, w in attention_terms(config, bias=False)],
        "scores": [(2, f"B H K {s}") for s in squares],
        "mix": [(2, f"B H {U} {s}") for s in squares],
        "feedforward": _feedforward_flops(config, blocks),
        "head": [(2 * n, f"N {w}") for n, w in _head_matmuls(config)],
    }
    if config.embedding.width is not None:
        parts["embedding"] = [(2, f"{tokens} D width") for tokens in (["Nₑ", "N"] if both else ["N"])]
    if both:
        q, k, v, o = widths(config)
        parts["cross_projections"] = [(2, f"N L D {w}") for w in (q, o)] + [(2, f"Nₑ L D {w}") for w in (k, v)]
        parts["cross_scores"] = [(2, "B L T S H K"), (2, f"B L T S H {U}")]
    kinds = feedforward_kinds(config)
    for part, subscript, layers in kinds if len(kinds) > 1 else []:
        values |= kind_letters(part, subscript, layers)
    return {name: formula(values, terms) for name, terms in parts.items()}


def _feedforward_flops(config: ModelConfig, blocks: list[str]) -> list[Term]:
    kinds = feedforward_kinds(config)
    terms = [term for part, subscript, _ in kinds for term in with_subscript(_matmuls(part), subscript)]
    if len(kinds) == 1:
        return [(2 * n, f"{b} {w}") for b in blocks for n, w in terms]
    return [(2 * n, w) for part, sub, _ in kinds for n, w in with_subscript(_matmuls(part), sub, "N L")]


def _matmuls(part: FeedForward) -> list[Term]:
    """Return the weights of the matmuls that one token uses in one block."""
    if isinstance(part, NoFeedForward):
        return []
    if not isinstance(part, MoE):
        return [(3 if isinstance(part, Gated) else 2, "D F")]
    shared = [] if part.shared is None else of_shared(_matmuls(part.shared))
    return [
        *((n, f"A {names}") for n, names in _matmuls(part.expert)),
        (1, "E D"),
        *shared,
        (int(part.shared_gate), "D"),
    ]


def _head_matmuls(config: ModelConfig) -> list[Term]:
    if config.head is None:
        return []
    W = "D" if config.head.width is None else "output"
    return [(1, f"{W} V"), (int(config.head.has_transform), f"D {W}")]
