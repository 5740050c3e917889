"""Configs of whole models: the common fields, and what each of the three kinds adds."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, assert_never

from glassformer.config.parts import (
    Attention,
    Dense,
    Embedding,
    FeedForward,
    Gated,
    Head,
    LayerNorm,
    MoE,
    NoFeedForward,
    Norm,
    Special,
)
from glassformer.config.position import Learned, Position, QueryKeyPosition
from glassformer.errors import require, require_choice, require_positive

Placement = Literal["pre", "post", "parallel"]
"""Where the norms of a block are; see ModelConfig.placement."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Transformer. Use one of its three kinds: `DecoderConfig`, `EncoderConfig`, `Seq2SeqConfig`."""

    vocab_size: int
    """V, the number of token ids. Training sets it to the vocabulary of the tokenizer."""
    d_model: int
    """D, the width of the residual stream."""
    n_layers: int
    """L, the number of blocks; in an encoder-decoder, of the decoder."""
    attention: Attention
    """The attention of every block."""
    feedforward: FeedForward
    """The feed-forward of every block."""
    norm: Norm = LayerNorm()
    """The norm of the blocks, of the embedding and of the final hidden states."""
    position: Position = Learned()
    """How the model knows the order of the tokens."""
    placement: Placement = "pre"
    """pre: x + f(norm(x)), with a final norm. post: norm(x + f(x)), without one. parallel: x + attention(n) +
    feedforward(n) with one shared n = norm(x), and a final norm."""
    max_len: int | None = None
    """The longest context in tokens: the number of rows of a learned table, and the limit of generation. none: no
    limit."""
    embedding: Embedding = Embedding()
    """The token embedding."""
    head: Head | None = Head()
    """The output head, from hidden states to logits; none: a model that only returns hidden states."""
    dropout: float = 0.0
    """Probability of dropout after the embedding, on attention patterns and on the output of every branch, in
    training."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    special: Special = Special()
    """Token ids with a special meaning."""

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
            "placement='parallel' computes a feed-forward next to attention, and this model has none: use 'pre', which "
            "computes the same.",
        )
        self.position.check(self)
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

    @property
    def n_heads(self) -> int:
        """H, the number of query heads."""
        return self.attention.n_heads

    @property
    def n_kv_heads(self) -> int:
        """G, the number of key/value heads."""
        return self.attention.n_kv_heads or self.attention.n_heads

    @property
    def d_head(self) -> int:
        """K, the width of a query and of a key."""
        return self.attention.d_head or self.d_model // self.attention.n_heads

    @property
    def d_value(self) -> int:
        """U, the width of a value."""
        return self.attention.d_value or self.d_head

    @property
    def scale(self) -> float:
        """The factor on q.k."""
        return 1 / math.sqrt(self.d_head) if self.attention.scale is None else self.attention.scale

    @property
    def out_bias(self) -> bool:
        """True if the output projection of attention has a bias."""
        return self.attention.bias if self.attention.out_bias is None else self.attention.out_bias

    @property
    def d_ff(self) -> int:
        """F, the width of the feed-forward or of one expert; 0 without a feed-forward."""
        match self.feedforward:
            case MoE(expert=expert):
                return expert.d_ff
            case NoFeedForward():
                return 0
            case Dense(d_ff=width) | Gated(d_ff=width):
                return width
            case _:
                assert_never(self.feedforward)

    @property
    def learned_positions(self) -> Learned | None:
        """The trained table of position vectors; None if the positions are not learned vectors."""
        table = self.position.vectors if isinstance(self.position, QueryKeyPosition) else self.position
        return table if isinstance(table, Learned) else None

    def window(self, layer: int) -> int | None:
        """Return W of one layer, None if its attention has no window."""
        layers = self.attention.window_layers
        return self.attention.window if layers is None or layer in layers else None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Causal self-attention: predicts the next token."""

    kind: ClassVar[str] = "decoder"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """Unmasked self-attention: every token attends to every token."""

    kind: ClassVar[str] = "encoder"
    pooler: bool = False
    """Add the sentence vector tanh(W h_0 + b) of BERT."""


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(ModelConfig):
    """An encoder and a causal decoder with cross-attention; `n_layers` counts the decoder's blocks."""

    kind: ClassVar[str] = "seq2seq"
    n_encoder_layers: int
    """Number of blocks of the encoder."""
    special: Special = field(default_factory=lambda: Special(start=0))
    """Token ids with a special meaning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "n_encoder_layers")
        require(
            self.placement != "parallel",
            "placement='parallel' does not support cross-attention: use 'pre' or 'post'.",
        )
        require(
            self.attention.window_layers is None,
            "window_layers is ambiguous in an encoder-decoder, which has two stacks: leave it out.",
        )


MODEL_KINDS: dict[str, type[ModelConfig]] = {c.kind: c for c in (DecoderConfig, EncoderConfig, Seq2SeqConfig)}
"""The three kinds of models by the name that files have for them."""
