"""Configs of whole models: the common fields, and what each of the three kinds adds."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, assert_never

from glassformer.config.experts import FeedForward, MoE
from glassformer.config.parts import (
    Attention,
    Dense,
    Embedding,
    Gated,
    Head,
    LayerNorm,
    NoFeedForward,
    Norm,
    Special,
)
from glassformer.config.position import Learned, LongScaling, NoPosition, Position, QueryKeyPosition, Rotary, T5Bias
from glassformer.errors import require, require_choice, require_positive

Placement = Literal["pre", "post", "parallel", "parallel_two", "sandwich", "after"]
"""Where the norms of a block are; see ModelConfig.placement."""
PARALLEL = ("parallel", "parallel_two")
"""Placements in which attention and feed-forward read the same residual stream."""


@dataclass(frozen=True)
class LayerKind:
    """What some layers have in place of the model's position scheme or feed-forward."""

    layers: tuple[int, ...]
    """Indices of these layers."""
    position: Rotary | NoPosition | None = None
    """Rotary positions with other frequencies, or no positions. Default: as the model."""
    feedforward: FeedForward | None = None
    """Another feed-forward, as in models that mix dense layers with experts. Default: as the model."""

    def __post_init__(self) -> None:
        require(len(self.layers) > 0, "LayerKind.layers is empty: list the layers, or leave the kind out.")
        require(
            self.position is not None or self.feedforward is not None,
            "LayerKind changes nothing: give position or feedforward.",
        )


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
    score_bias: T5Bias | None = None
    """A T5 bias on the scores next to other positions, as in MPNet. Default: none."""
    placement: Placement = "pre"
    """pre: x + f(norm(x)), with a final norm. post: norm(x + f(x)), without one. after: x + norm(f(x)), with a final
    norm. sandwich: x + norm2(f(norm1(x))), with a final norm. parallel: x + attention(n) + feedforward(n) with one
    shared n = norm(x), and a final norm. parallel_two: the same with a norm for each of the two."""
    first_norm: bool = True
    """False: the attention of the first layer reads the embedding without a norm before it, as in ModernBERT, whose
    embedding has a norm already."""
    residual_scale: float = 1.0
    """Factor on the output of every branch before it is added to the residual stream."""
    layer_kinds: tuple[LayerKind, ...] = ()
    """Layers with another position scheme or feed-forward. A layer is listed at most once for each of the two."""
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
    shared_blocks: tuple[int, ...] | None = None
    """The block whose parameters each layer uses, as in ALBERT: (0, 0, 1, 1) for 4 layers in 2 groups. Blocks are
    numbered by first use. Default: every layer has a block of its own."""
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
        for layer in range(self.n_layers if self.layer_kinds else 1):
            require(
                self.placement not in PARALLEL or not isinstance(self.layer_feedforward(layer), NoFeedForward),
                f"placement={self.placement!r} computes a feed-forward next to attention, and this model has none: use "
                "'pre', which computes the same.",
            )
        require(self.residual_scale > 0, f"residual_scale={self.residual_scale} must be positive.")
        self.position.check(self)
        require(
            self.score_bias is None or not isinstance(self.position, T5Bias),
            "score_bias is a T5 bias next to another position scheme, but position is a T5 bias itself: leave "
            "score_bias out, or use another position.",
        )
        require(
            self.head is None or not self.head.tied or self.head_width == self.embedding_width,
            f"a tied head uses the token table of width {self.embedding_width}, but its input has width "
            f"{self.head_width}: set head.width={self.embedding_width}, or head.tied=False.",
        )
        require(
            self.first_norm or self.placement == "pre",
            f"first_norm=False leaves out the norm before the first attention; placement={self.placement!r} has none "
            "there: use 'pre'.",
        )
        self._check_layer_kinds()
        self._check_shared_blocks()
        self._check_latent()
        for layer in self.attention.window_layers or ():
            require(
                0 <= layer < self.n_layers,
                f"window_layers names layer {layer}, but the layers are 0 to {self.n_layers - 1}.",
            )
        several = [(name, token) for name in ("eos", "suppressed") for token in getattr(self.special, name)]
        single = [(name, getattr(self.special, name)) for name in ("bos", "pad", "start", "forced_bos", "forced_eos")]
        for name, token in single + several:
            require(
                token is None or 0 <= token < self.vocab_size,
                f"special.{name}={token} is outside the vocabulary of {self.vocab_size} ids.",
            )

    def _check_shared_blocks(self) -> None:
        shared = self.shared_blocks
        if shared is None:
            return
        require(
            len(shared) == self.n_layers,
            f"shared_blocks has {len(shared)} entries, but n_layers={self.n_layers}: name the block of every layer.",
        )
        first_use = list(dict.fromkeys(shared))
        require(
            first_use == list(range(len(first_use))),
            f"shared_blocks={shared} must number the blocks 0, 1, 2, ... in the order in which layers first use them.",
        )
        require(
            self.first_norm or shared.count(0) == 1,
            "first_norm=False makes the first layer differ from the others, but shared_blocks shares its block.",
        )
        require(
            all(kind.feedforward is None for kind in self.layer_kinds),
            "shared_blocks makes layers share a feed-forward, and layer_kinds gives some layers another one: use one "
            "of the two.",
        )

    def _check_latent(self) -> None:
        if self.attention.latent is None:
            return
        shared = self.attention.latent.d_shared
        require(
            shared < self.d_head,
            f"latent.d_shared={shared} must be less than d_head={self.d_head}, which has components of each head too.",
        )
        for layer in range(self.n_layers):
            position = self.layer_position(layer)
            require(
                isinstance(position, NoPosition)
                or (isinstance(position, Rotary) and position.rotated(self.d_head) == shared),
                f"latent.d_shared={shared} are the rotated components of a key: use rotary positions with "
                f"fraction={shared}/{self.d_head}, or none.",
            )

    def _check_layer_kinds(self) -> None:
        for field_ in ("position", "feedforward"):
            listed = [i for kind in self.layer_kinds if getattr(kind, field_) is not None for i in kind.layers]
            wrong = [i for i in listed if not 0 <= i < self.n_layers]
            require(not wrong, f"layer_kinds names layers {wrong}, but the layers are 0 to {self.n_layers - 1}.")
            twice = sorted({i for i in listed if listed.count(i) > 1})
            require(not twice, f"layer_kinds gives layers {twice} more than one {field_}: list each layer once.")
        for kind in self.layer_kinds:
            if kind.position is not None:
                kind.position.check(self)
                require(
                    isinstance(self.position, Rotary | NoPosition),
                    f"layer_kinds changes the position scheme of some layers, but position={self.position.kind!r} acts "
                    "on all of them: use rotary positions, or none.",
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
    def embedding_width(self) -> int:
        """Width of the token and segment tables."""
        return self.embedding.width or self.d_model

    @property
    def position_width(self) -> int:
        """Width of the position vectors that are added to the embedding, and of its norm."""
        return self.embedding_width if self.embedding.project == "after_norm" else self.d_model

    @property
    def head_width(self) -> int:
        """Width of the vectors that the output matrix reads."""
        return self.d_model if self.head is None else self.head.width or self.d_model

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
    def trained_bias(self) -> T5Bias | None:
        """The T5 bias on the scores, alone or next to other positions; None without one."""
        return self.position if isinstance(self.position, T5Bias) else self.score_bias

    @property
    def biases_scores(self) -> bool:
        """True if something is added to the scores of every block."""
        return self.position.biases_scores or self.score_bias is not None

    @property
    def learned_positions(self) -> Learned | None:
        """The trained table of position vectors; None if the positions are not learned vectors."""
        table = self.position.vectors if isinstance(self.position, QueryKeyPosition) else self.position
        return table if isinstance(table, Learned) else None

    @property
    def changes_frequencies_at(self) -> int | None:
        """The number of tokens beyond which rotary frequencies change (LongScaling); None: they never change."""
        schemes = [self.position, *(kind.position for kind in self.layer_kinds if kind.position is not None)]
        scalings = [scheme.scaling for scheme in schemes if isinstance(scheme, Rotary)]
        return min((s.original_max_len for s in scalings if isinstance(s, LongScaling)), default=None)

    def has_attention_norm(self, layer: int) -> bool:
        """Return whether a norm of its own precedes (or follows) the attention of a layer."""
        return self.first_norm or layer > 0

    def block_of_layer(self, layer: int) -> int:
        """Return the index of the block whose parameters a layer uses."""
        return layer if self.shared_blocks is None else self.shared_blocks[layer]

    def layer_position(self, layer: int) -> Position:
        """Return the position scheme of one layer."""
        kinds = (kind.position for kind in self.layer_kinds if kind.position is not None and layer in kind.layers)
        return next(kinds, self.position)

    def layer_feedforward(self, layer: int) -> FeedForward:
        """Return the feed-forward of one layer."""
        kinds = (k.feedforward for k in self.layer_kinds if k.feedforward is not None and layer in k.layers)
        return next(kinds, self.feedforward)

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
            self.placement not in PARALLEL,
            f"placement={self.placement!r} does not support cross-attention: use 'pre' or 'post'.",
        )
        given = {"window_layers": self.attention.window_layers, "layer_kinds": self.layer_kinds or None}
        given["shared_blocks"] = self.shared_blocks
        for name, value in given.items():
            require(value is None, f"{name} is ambiguous in an encoder-decoder, which has two stacks: leave it out.")


MODEL_KINDS: dict[str, type[ModelConfig]] = {c.kind: c for c in (DecoderConfig, EncoderConfig, Seq2SeqConfig)}
"""The three kinds of models by the name that files have for them."""
