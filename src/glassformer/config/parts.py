"""The parts of a block and the ends of a model: norm, attention, feed-forward, embedding, head."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from glassformer.errors import ConfigError, listing, require, require_choice, require_positive

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh"]
"""Every activation: `gelu` is exact, `gelu_tanh` its tanh approximation, `relu2` the square of relu."""


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, var biased (divided by D). Ba et al. 2016."""

    kind: ClassVar[str] = "layer_norm"
    eps: float = 1e-5
    """Added to the variance before the square root."""
    bias: bool = True
    """Train a bias as well as a weight."""

    def __post_init__(self) -> None:
        require(self.eps > 0, f"LayerNorm.eps={self.eps} must be positive, or a constant vector divides by zero.")


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight. Zhang and Sennrich 2019."""

    kind: ClassVar[str] = "rms_norm"
    eps: float = 1e-6
    """Added to the mean square before the square root."""

    def __post_init__(self) -> None:
        require(self.eps > 0, f"RMSNorm.eps={self.eps} must be positive, or a zero vector divides by zero.")


Norm = LayerNorm | RMSNorm
"""Every norm."""


@dataclass(frozen=True)
class Attention:
    """softmax(q k^T * scale + bias) v over H query heads that share G key/value heads: head h reads h // (H/G)."""

    n_heads: int
    """H, the number of query heads."""
    n_kv_heads: int | None = None
    """G, the number of key/value heads. Default: n_heads (multi-head). 1 is multi-query attention."""
    d_head: int | None = None
    """K, the width of a query and of a key. Default: d_model / n_heads."""
    d_value: int | None = None
    """U, the width of a value. Default: d_head."""
    scale: float | None = None
    """Factor on q.k. Default: 1/sqrt(K)."""
    bias: bool = True
    """Biases on the query, key and value projections."""
    out_bias: bool | None = None
    """Bias on the output projection. Default: as `bias`."""
    qk_norm: Norm | None = None
    """Norm of each head's query and key (width K), before rotation. Default: none."""
    window: int | None = None
    """W: a query attends to itself and to the W - 1 tokens before it (in an encoder also W - 1 after). Default: no
    window."""
    window_layers: tuple[int, ...] | None = None
    """Indices of the layers that use the window. Default: all layers."""

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
    """F, the width of the hidden layer."""
    activation: Activation = "gelu_tanh"
    """The activation of the hidden layer."""
    bias: bool = True
    """Biases on both projections."""

    def __post_init__(self) -> None:
        require_positive(self, "d_ff")
        require_choice(self, "activation", Activation)


@dataclass(frozen=True)
class Gated:
    """down(activation(gate(x)) * up(x)): SwiGLU with silu, GEGLU with gelu. Shazeer 2020."""

    kind: ClassVar[str] = "gated"
    d_ff: int
    """F, the width of the hidden layer."""
    activation: Activation = "silu"
    """The activation of the gate."""
    bias: bool = False
    """Biases on the three projections."""

    def __post_init__(self) -> None:
        require_positive(self, "d_ff")
        require_choice(self, "activation", Activation)


@dataclass(frozen=True)
class MoE:
    """A mixture of experts: the sum of p_e * expert_e(x) over the A experts with the largest p_e.

    p = softmax(router(x)) over all E experts, then the A largest (ties: lowest index), divided by their sum if
    `normalize`. No token is dropped. Fedus et al. 2021; Jiang et al. 2024 for the normalised form.
    """

    kind: ClassVar[str] = "moe"
    n_experts: int
    """E, the number of experts."""
    n_active: int
    """A, the number of experts that compute each token."""
    expert: Dense | Gated
    """The feed-forward of one expert."""
    normalize: bool = True
    """Divide the A largest probabilities by their sum."""

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
"""Every feed-forward."""


@dataclass(frozen=True)
class Embedding:
    """scale * tokens[id] (+ segments[s]) (+ positions), then the norm if `norm`."""

    scale: float = 1.0
    """Factor on the token embedding."""
    n_segments: int = 0
    """Number of segment ids (BERT's token types); 0: no segment embedding."""
    norm: bool = False
    """Apply the norm of the model to the embedding."""

    def __post_init__(self) -> None:
        require(self.n_segments >= 0, f"Embedding.n_segments={self.n_segments} must be 0 or more.")


@dataclass(frozen=True)
class Head:
    """logits = (scale * h) W^T + bias, with h = norm(activation(transform(x))) if `transform` names an activation."""

    tied: bool = True
    """Use the token embedding as W: one parameter, not two equal ones."""
    bias: bool = False
    """Train a bias of the logits."""
    scale: float = 1.0
    """Factor on the input of the head."""
    transform: Activation | None = None
    """Activation of a linear layer and norm before the head, as in BERT's masked-LM head. Default: no such layer."""

    def __post_init__(self) -> None:
        if self.transform is not None:
            require_choice(self, "transform", Activation)


@dataclass(frozen=True)
class Special:
    """Token ids with a special meaning. Generation and the tokenizer use them; the forward pass does not."""

    bos: int | None = None
    """Beginning of a text."""
    eos: tuple[int, ...] = ()
    """Ends of a text: generation stops after one of them."""
    pad: int | None = None
    """Padding."""
    start: int | None = None
    """First decoder token of an encoder-decoder."""
