"""A whole model: what its three kinds share, and what each adds."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from glassformer.config.errors import require, require_choice, require_positive
from glassformer.config.parts import (
    Attention,
    Dense,
    Embedding,
    Gated,
    Head,
    LayerNorm,
    MoE,
    NoFeedForward,
    RMSNorm,
    Special,
)
from glassformer.config.position import Alibi, Infused, Learned, NoPosition, NTKScaling, Rotary, Sinusoidal, T5Bias

Placement = Literal["pre", "post", "parallel"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Transformer. Use one of its three kinds: `DecoderConfig`, `EncoderConfig`, `Seq2SeqConfig`."""

    vocab_size: int
    d_model: int
    n_layers: int
    attention: Attention
    feedforward: Dense | Gated | MoE | NoFeedForward
    norm: LayerNorm | RMSNorm = LayerNorm()
    position: NoPosition | Learned | Sinusoidal | Rotary | Alibi | T5Bias | Infused = Learned()
    placement: Placement = "pre"
    """pre: x + f(norm(x)), with a final norm. post: norm(x + f(x)), without one. parallel: x + attention(n) +
    feedforward(n) with one shared n = norm(x), and a final norm."""
    max_len: int | None = None
    """The context the model was made for. Rows of a learned table; elsewhere a limit that `generate` respects."""
    embedding: Embedding = Embedding()
    head: Head | None = Head()
    dropout: float = 0.0
    init_std: float = 0.02
    special: Special = Special()

    def __post_init__(self) -> None:
        require(
            type(self) is not ModelConfig,
            "ModelConfig is the common part of DecoderConfig, EncoderConfig and Seq2SeqConfig: make one of those.",
        )
        require_positive(self, "vocab_size", "d_model", "n_layers")
        if self.max_len is not None:
            require_positive(self, "max_len")
        require_choice(self, "placement", Placement)
        require(0 <= self.dropout < 1, f"dropout={self.dropout} must be in [0, 1).")
        require(self.init_std > 0, f"init_std={self.init_std} must be positive.")
        require(
            self.attention.d_head is not None or self.d_model % self.attention.n_heads == 0,
            f"d_model={self.d_model} is not a multiple of n_heads={self.attention.n_heads}, so heads have no "
            f"even width. Use a multiple of {self.attention.n_heads}, or give d_head.",
        )
        require(
            self.placement != "parallel" or not isinstance(self.feedforward, NoFeedForward),
            "placement='parallel' sets a feed-forward beside attention, and this model has none: use 'pre', which "
            "computes the same.",
        )
        self._validate_position()
        for layer in self.attention.window_layers or ():
            require(
                0 <= layer < self.n_layers,
                f"window_layers names layer {layer}, but the layers are 0 to {self.n_layers - 1}.",
            )
        ids = {"bos": self.special.bos, "pad": self.special.pad, "start": self.special.start}
        for name, token in [*ids.items(), *(("eos", token) for token in self.special.eos)]:
            require(
                token is None or 0 <= token < self.vocab_size,
                f"special.{name}={token} is outside the vocabulary of {self.vocab_size} ids.",
            )

    def _validate_position(self) -> None:
        match self.position:
            case Learned() | Infused(vectors=Learned()):
                require(self.max_len is not None, "learned positions need max_len: it is the length of their table.")
            case Sinusoidal() | Infused():
                require(
                    self.d_model % 2 == 0, f"sinusoidal positions pair components: d_model={self.d_model} must be even."
                )
            case Rotary() as rotary:
                rotated = rotary.rotated(self.d_head)
                require(
                    rotated >= 2 and rotated % 2 == 0,
                    f"rotary positions turn pairs: d_head={self.d_head} times fraction={rotary.fraction} gives "
                    f"{rotated}, which must be even and at least 2.",
                )
                require(
                    not isinstance(rotary.scaling, NTKScaling) or rotated > 2,
                    "NTK scaling raises to R/(R-2) and needs more than 2 rotated components per head.",
                )
            case NoPosition() | Alibi() | T5Bias():
                pass

    # Derived values, so that nobody writes `cfg.attention.n_kv_heads or cfg.attention.n_heads` twice.

    @property
    def n_heads(self) -> int:
        return self.attention.n_heads

    @property
    def n_kv_heads(self) -> int:
        return self.attention.n_kv_heads or self.attention.n_heads

    @property
    def d_head(self) -> int:
        return self.attention.d_head or self.d_model // self.attention.n_heads

    @property
    def d_value(self) -> int:
        return self.attention.d_value or self.d_head

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.d_head) if self.attention.scale is None else self.attention.scale

    @property
    def out_bias(self) -> bool:
        return self.attention.bias if self.attention.out_bias is None else self.attention.out_bias

    @property
    def d_ff(self) -> int:
        """Width of the feed-forward, of one expert when there are several; 0 without one."""
        match self.feedforward:
            case MoE(expert=expert):
                return expert.d_ff
            case NoFeedForward():
                return 0
            case Dense(d_ff=width) | Gated(d_ff=width):
                return width

    @property
    def learned_positions(self) -> Learned | None:
        """The trained table of position vectors, added to the embedding or infused; None where there is none."""
        table = self.position.vectors if isinstance(self.position, Infused) else self.position
        return table if isinstance(table, Learned) else None

    def window(self, layer: int) -> int | None:
        """W of one layer, None when it sees everything."""
        layers = self.attention.window_layers
        return self.attention.window if layers is None or layer in layers else None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Causal self-attention: predicts the next token."""

    kind: ClassVar[str] = "decoder"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Unmasked self-attention: every token sees every token. `pooler` adds tanh(W h_0 + b)."""

    kind: ClassVar[str] = "encoder"
    pooler: bool = False


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(ModelConfig):
    """An encoder read by a causal decoder through cross-attention; `n_layers` counts the decoder's blocks."""

    kind: ClassVar[str] = "seq2seq"
    n_encoder_layers: int
    special: Special = field(default_factory=lambda: Special(start=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "n_encoder_layers")
        require(
            self.placement != "parallel", "placement='parallel' has no place for cross-attention: use 'pre' or 'post'."
        )
        require(
            self.attention.window_layers is None,
            "window_layers cannot say whose layers it means in an encoder-decoder: leave it out to window all of them.",
        )


MODEL_KINDS: dict[str, type[ModelConfig]] = {c.kind: c for c in (DecoderConfig, EncoderConfig, Seq2SeqConfig)}
