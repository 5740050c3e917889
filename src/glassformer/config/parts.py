"""The parts of a block and the ends of a model: norm, attention, feed-forward, embedding, head."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from glassformer.errors import ConfigError, listing, require, require_choice, require_positive

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh", "quick_gelu"]
"""Every activation: `gelu` is exact, `gelu_tanh` its tanh approximation, `relu2` the square of relu, `quick_gelu`
x * sigmoid(1.702 x)."""


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / sqrt(var + eps) * (offset + weight) + bias, var biased (divided by D). Ba et al. 2016."""

    kind: ClassVar[str] = "layer_norm"
    eps: float = 1e-5
    """Added to the variance before the square root."""
    bias: bool = True
    """Train a bias as well as a weight."""
    weight: bool = True
    """Train a weight; false: the norm has no parameters."""
    offset: float = 0.0
    """Constant added to the weight (1 in Nemotron, whose stored weights are near 0)."""

    def __post_init__(self) -> None:
        require(self.eps > 0, f"LayerNorm.eps={self.eps} must be positive, or a constant vector divides by zero.")
        _check_weight(self)
        require(self.weight or not self.bias, "LayerNorm.weight=False has no parameters at all: set bias=False too.")


@dataclass(frozen=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * (offset + weight). Zhang and Sennrich 2019."""

    kind: ClassVar[str] = "rms_norm"
    eps: float = 1e-6
    """Added to the mean square before the square root."""
    weight: bool = True
    """Train a weight; false: the norm has no parameters."""
    offset: float = 0.0
    """Constant added to the weight (1 in Gemma, whose stored weights are near 0)."""

    def __post_init__(self) -> None:
        require(self.eps > 0, f"RMSNorm.eps={self.eps} must be positive, or a zero vector divides by zero.")
        _check_weight(self)


Norm = LayerNorm | RMSNorm
"""Every norm."""


def _check_weight(norm: Norm) -> None:
    name = type(norm).__name__
    require(norm.weight or norm.offset == 0, f"{name}.offset={norm.offset} is added to the weight: set weight=True.")


@dataclass(frozen=True)
class Latent:
    """Keys and values from one low-rank vector of each token (multi-head latent attention). DeepSeek-AI 2024.

    c = norm(down(x)) has `kv_rank` components. A key of head h consists of `d_shared` components that all heads share,
    a projection of x which is rotated, and of d_head - d_shared components k_h(c); its value is v_h(c). The KV cache
    holds c and the shared components. With `q_rank`, queries are projected from a norm of a low-rank vector too.
    """

    kv_rank: int
    """Width of the vector from which keys and values are computed."""
    d_shared: int
    """Number of components of a key that all heads share: the rotated ones."""
    q_rank: int | None = None
    """Width of the vector from which queries are computed. Default: queries are computed from x."""
    norm: Norm = RMSNorm()
    """The norm of both vectors."""

    def __post_init__(self) -> None:
        require_positive(self, "kv_rank", "d_shared")
        if self.q_rank is not None:
            require_positive(self, "q_rank")


NormedPart = Literal["head", "heads", "all"]
"""What the norm of queries and keys runs over; see Attention.qk_norm_over."""


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
    """Norm of queries and keys. Default: none."""
    qk_norm_over: NormedPart = "head"
    """What the norm of queries and keys runs over. head: each head (width K), with one weight for all heads. heads:
    each head, with a weight for each. all: the whole projection (widths H*K and G*K), before it is split into heads."""
    qk_norm_after_rotation: bool = False
    """Normalize queries and keys after they are rotated, not before."""
    clip: float | None = None
    """Clamp queries, keys and values to [-clip, clip], after the norm of queries and keys and before the rotation."""
    softcap: float | None = None
    """Replace each score s by softcap * tanh(s / softcap), before the mask. Default: none."""
    sinks: bool = False
    """Train one more score per query head: it takes part in the softmax and its probability is dropped."""
    latent: Latent | None = None
    """Compute keys and values of all heads from one low-rank vector. Default: project them from x. `bias` is then that
    of the projections to the low-rank vectors."""
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
        for name in ("scale", "clip", "softcap"):
            value = getattr(self, name)
            require(value is None or value > 0, f"Attention.{name}={value} must be positive.")
        require_choice(self, "qk_norm_over", NormedPart)
        self._check_qk_norm()
        if self.latent is not None:
            require(
                self.n_kv_heads in (None, self.n_heads) and self.qk_norm is None and self.clip is None,
                "Attention.latent computes keys and values of each head from one vector: leave out n_kv_heads, qk_norm "
                "and clip.",
            )
        require(
            self.window_layers is None or self.window is not None,
            "Attention.window_layers is set but window is not: give the window, or drop window_layers.",
        )

    def _check_qk_norm(self) -> None:
        changed = self.qk_norm_over != "head" or self.qk_norm_after_rotation
        require(
            self.qk_norm is not None or not changed,
            "Attention.qk_norm_over and qk_norm_after_rotation describe the norm of queries and keys: give qk_norm.",
        )
        require(
            self.qk_norm_over != "all" or not self.qk_norm_after_rotation,
            "Attention.qk_norm_over='all' runs before the heads are split, and rotation comes after: set "
            "qk_norm_after_rotation=False.",
        )
        norm = self.qk_norm
        require(
            self.qk_norm_over != "heads" or norm is None or (norm.weight and not getattr(norm, "bias", False)),
            "Attention.qk_norm_over='heads' trains a weight for each head and no bias: use RMSNorm(), or "
            "LayerNorm(bias=False).",
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

    @property
    def has_down_bias(self) -> bool:
        return self.bias

    def __post_init__(self) -> None:
        require_positive(self, "d_ff")
        require_choice(self, "activation", Activation)


@dataclass(frozen=True)
class Gated:
    """down(activation(gate(x)) * (up(x) + up_offset)): SwiGLU with silu, GEGLU with gelu. Shazeer 2020.

    With `limit` l, gate(x) is limited to at most l, and up(x) to [-l, l].
    """

    kind: ClassVar[str] = "gated"
    d_ff: int
    """F, the width of the hidden layer."""
    activation: Activation = "silu"
    """The activation of the gate."""
    bias: bool = False
    """Biases on the three projections; of the last one, `down_bias` may say otherwise."""
    limit: float | None = None
    """Bound of gate(x) and up(x). Default: none."""
    up_offset: float = 0.0
    """Constant added to up(x) (1 in gpt-oss)."""
    down_bias: bool | None = None
    """Bias on the down projection. Default: as `bias`."""

    @property
    def has_down_bias(self) -> bool:
        return self.bias if self.down_bias is None else self.down_bias

    def __post_init__(self) -> None:
        require_positive(self, "d_ff")
        require_choice(self, "activation", Activation)
        require(self.limit is None or self.limit > 0, f"Gated.limit={self.limit} must be positive.")


@dataclass(frozen=True)
class NoFeedForward:
    """Attention only: a block has no second branch and no norm for one. Elhage et al. 2021 study such models."""

    kind: ClassVar[str] = "none"


ProjectionPlace = Literal["after_norm", "before_positions"]
"""Where an embedding of another width than D is projected to D; see Embedding.project."""


@dataclass(frozen=True)
class Embedding:
    """scale * tokens[id] (+ segments[s]) (+ positions), then the norm if `norm`; with `width`, projected to D."""

    scale: float = 1.0
    """Factor on the token embedding."""
    n_segments: int = 0
    """Number of segment ids (BERT's token types); 0: no segment embedding."""
    norm: bool = False
    """Apply the norm of the model to the embedding."""
    width: int | None = None
    """Width of the token and segment tables, followed by a linear layer to D. Default: D, without such a layer."""
    project: ProjectionPlace = "after_norm"
    """Where that linear layer is: after positions and norm, which then have this width too (ALBERT, ELECTRA), or before
    the positions are added (OPT 350M)."""
    project_bias: bool = True
    """Train a bias of that linear layer."""

    def __post_init__(self) -> None:
        require(self.n_segments >= 0, f"Embedding.n_segments={self.n_segments} must be 0 or more.")
        require_choice(self, "project", ProjectionPlace)
        if self.width is not None:
            require_positive(self, "width")
        require(
            self.width is not None or (self.project == "after_norm" and self.project_bias),
            "Embedding.project and project_bias describe the projection of a table of another width: give width too.",
        )


@dataclass(frozen=True)
class Head:
    """logits = (scale * h) W^T + bias, with h = norm(activation(transform(x))) if `transform` names an activation.

    With `width` and no activation, h = transform(x), a linear layer alone (OPT 350M). With `softcap` c the logits z
    become c * tanh(z / c).
    """

    tied: bool = True
    """Use the token embedding as W: one parameter, not two equal ones."""
    bias: bool = False
    """Train a bias of the logits."""
    scale: float = 1.0
    """Factor on the input of the head."""
    transform: Activation | None = None
    """Activation of a linear layer and norm before the head, as in BERT's masked-LM head. Default: no such layer."""
    width: int | None = None
    """Width of h, the output of the linear layer before the head. Default: D; without a transform, no such layer."""
    transform_bias: bool = True
    """Train a bias of that linear layer."""
    softcap: float | None = None
    """Bound c of the logits. Default: none."""

    def __post_init__(self) -> None:
        require(self.softcap is None or self.softcap > 0, f"Head.softcap={self.softcap} must be positive.")
        if self.transform is not None:
            require_choice(self, "transform", Activation)
        if self.width is not None:
            require_positive(self, "width")
        require(
            self.transform_bias or self.has_transform,
            "Head.transform_bias=False describes the linear layer before the head: give transform or width too.",
        )

    @property
    def has_transform(self) -> bool:
        """True if a linear layer precedes the head."""
        return self.transform is not None or self.width is not None


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
    forced_bos: int | None = None
    """The first token of every generated text, such as the language of a translation. Default: none."""
    forced_eos: int | None = None
    """The last token of a generated text that reaches its maximum length. Default: none."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never generated."""

    @property
    def limits_generation(self) -> bool:
        """True if any generated token is forced or suppressed."""
        return self.forced_bos is not None or self.forced_eos is not None or bool(self.suppressed)
