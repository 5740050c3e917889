"""The parts of a block and the ends of a model: norm, attention, feed-forward, embedding, head."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from glassformer.config.errors import ConfigError, listing, require, require_choice, require_positive

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh"]


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, var biased (divided by D). Ba et al. 2016."""

    kind: ClassVar[str] = "layer_norm"
    eps: float = 1e-5
    bias: bool = True

    def __post_init__(self) -> None:
        require(self.eps > 0, f"LayerNorm.eps={self.eps} must be positive, or a constant row divides by zero.")


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight. Zhang and Sennrich 2019."""

    kind: ClassVar[str] = "rms_norm"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require(self.eps > 0, f"RMSNorm.eps={self.eps} must be positive, or a zero row divides by zero.")


Norm = LayerNorm | RMSNorm


@dataclass(frozen=True)
class Attention:
    """softmax(q k^T * scale + bias) v over H query heads that share G key/value heads: head h reads h // (H/G)."""

    n_heads: int
    n_kv_heads: int | None = None
    """G; None means one key/value head per query head (multi-head). 1 is multi-query."""
    d_head: int | None = None
    """K; None means d_model / n_heads."""
    d_value: int | None = None
    """U; None means d_head."""
    scale: float | None = None
    """Factor on q.k; None means 1/sqrt(K)."""
    bias: bool = True
    """Biases on the query, key and value projections."""
    out_bias: bool | None = None
    """Bias on the output projection; None means the same as `bias`."""
    qk_norm: LayerNorm | RMSNorm | None = None
    """Norm of each head's query and key (width K), before rotation."""
    window: int | None = None
    """W: a query sees itself and the W - 1 tokens before it (in an encoder also W - 1 after); None is unlimited."""
    window_layers: tuple[int, ...] | None = None
    """Layers that use the window; None means all of them."""

    def __post_init__(self) -> None:
        require_positive(self, "n_heads")
        for name in ("n_kv_heads", "d_head", "d_value", "window"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        groups = self.n_kv_heads or self.n_heads
        if self.n_heads % groups:
            divisors = [n for n in range(1, self.n_heads + 1) if self.n_heads % n == 0]
            raise ConfigError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={groups}: query heads cannot share "
                f"keys evenly. Use {listing(divisors)}."
            )
        require(self.scale is None or self.scale > 0, f"Attention.scale={self.scale} must be positive.")
        require(
            self.window_layers is None or self.window is not None,
            "Attention.window_layers is set but window is not: give the window, or drop window_layers.",
        )


@dataclass(frozen=True)
class Dense:
    """down(activation(up(x)))."""

    kind: ClassVar[str] = "dense"
    d_ff: int
    activation: Activation = "gelu_tanh"
    bias: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "d_ff")
        require_choice(self, "activation", Activation)


@dataclass(frozen=True)
class Gated:
    """down(activation(gate(x)) * up(x)): SwiGLU with silu, GEGLU with gelu. Shazeer 2020."""

    kind: ClassVar[str] = "gated"
    d_ff: int
    activation: Activation = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "d_ff")
        require_choice(self, "activation", Activation)


@dataclass(frozen=True)
class MoE:
    """Each token goes to the A experts its router likes best: sum over those of p_e * expert_e(x).

    p = softmax(router(x)) over all E, then the A largest (ties: lowest index), divided by their sum when `normalize`.
    No token is dropped. Fedus et al. 2021; Jiang et al. 2024 for the normalised form.
    """

    kind: ClassVar[str] = "moe"
    n_experts: int
    n_active: int
    expert: Dense | Gated
    normalize: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "n_experts", "n_active")
        require(
            self.n_active <= self.n_experts,
            f"n_active={self.n_active} exceeds n_experts={self.n_experts}: a token cannot visit more experts "
            "than exist.",
        )


@dataclass(frozen=True)
class NoFeedForward:
    """Attention only: a block has no second branch and no norm for one. Elhage et al. 2021 study such models."""

    kind: ClassVar[str] = "none"


FeedForward = Dense | Gated | MoE | NoFeedForward


@dataclass(frozen=True)
class Embedding:
    """scale * tokens[id] (+ segments[s]) (+ positions), then the norm if `norm`."""

    scale: float = 1.0
    n_segments: int = 0
    norm: bool = False

    def __post_init__(self) -> None:
        require(self.n_segments >= 0, f"Embedding.n_segments={self.n_segments} must be 0 or more.")


@dataclass(frozen=True)
class Head:
    """logits = (scale * h) W^T + bias, with h = norm(activation(transform(x))) when `transform` names an activation.

    `tied` uses the token table as W: one Parameter, not two equal ones. `transform` is BERT's masked-LM head.
    """

    tied: bool = True
    bias: bool = False
    scale: float = 1.0
    transform: Activation | None = None

    def __post_init__(self) -> None:
        if self.transform is not None:
            require_choice(self, "transform", Activation)


@dataclass(frozen=True)
class Special:
    """Ids with a meaning: used by generation and by the tokenizer, never by the arithmetic of the model."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    start: int | None = None
    """First decoder token of an encoder-decoder."""
