"""What families of encoders have in common: entries of config.json, and tables of tensor names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from glassformer.config import Activation, Head, Learned, ModelConfig
from glassformer.weights.convert import IDENTITY, Drop, Row, linear
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import Family, Source
from glassformer.weights.hf.layouts import Block
from glassformer.weights.keys import (
    INIT,
    SIZES,
    WIDTH,
    Dropout,
    Entry,
    Key,
    Values,
    activation,
    describe,
    eps,
    integer,
    lookup,
    only,
)

OURS = "encoder.blocks.{i}"
WORDS = "embeddings.word_embeddings.weight"
BASE: dict[str, Any] = {
    "kind": "encoder",
    "norm": {"kind": "layer_norm"},
    "feedforward": {"kind": "dense"},
    "embedding": {"norm": True},
    "placement": "post",
}
"""What BERT and its descendants share."""
ATTENTION = {
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
}
FEEDFORWARD = {"feedforward.up": "intermediate.dense", "feedforward.down": "output.dense"}
POST_NORMS = {"norm_attention": "attention.output.LayerNorm", "norm_feedforward": "output.LayerNorm"}
BERT: Block = {**ATTENTION, **FEEDFORWARD, **POST_NORMS}
"""The names of BERT."""
OUTSIDE = {
    "embed.tokens": "embeddings.word_embeddings",
    "embed.segments": "embeddings.token_type_embeddings",
    "encoder.position": "embeddings.position_embeddings",
    "encoder.embed_norm": "embeddings.LayerNorm",
    "pooler": "pooler.dense",
}
"""The names of BERT's modules that are in no block. Models that lack one of them ignore its row."""
POSITION_IDS = Drop("{p}embeddings.position_ids", "0, 1, 2, ..., stored by old versions")
IGNORED = (
    POSITION_IDS,
    *(Drop(f"classifier.{x}", "a classifier is not part of the model", notice=True) for x in ("weight", "bias")),
)


@dataclass(frozen=True)
class HeadNames:
    """Tensor names of a masked-LM head: a linear layer, a norm (both '' if there is none), output matrix and bias."""

    dense: str
    norm: str
    matrix: str
    bias: str = ""
    """The name of the bias if it is not that of the matrix. A tied head then stores the bias under both."""

    def rows(self, config: ModelConfig, table: str) -> tuple[Row, ...]:
        inner, tied = f"{self.matrix}.bias", config.head is None or config.head.tied
        bias = Row(self.bias or inner, ("head.bias",), aliases=(inner,) if self.bias else ())
        if self.bias and not tied:  # an untied head uses the bias of its matrix only
            bias = Row(inner, ("head.bias",), aliases=(self.bias,), strict=False)
        matrix = Row(f"{self.matrix}.weight", ("head.weight",), tied_to=table)
        transform = (*linear(self.dense, "head.transform"), *linear(self.norm, "head.norm")) if self.dense else ()
        return (*transform, matrix, bias)


CLS = HeadNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
LM_HEAD = HeadNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


@dataclass(frozen=True)
class MaskedHead:
    """The masked-LM head, which base models and classifiers do not have."""

    prefix: str
    names: HeadNames
    transform: Activation | None = None
    """The activation of the head. Default: that of the feed-forward."""
    table: str = WORDS
    default: bool = True
    """The default of `tie_word_embeddings`."""

    def read(self, source: Source, values: Values) -> None:
        if source.tensors is not None and not source.has(f"{self.names.dense}.weight"):
            values["head"] = None
            return
        prefix, tie = source.prefix(self.prefix), source.flag("tie_word_embeddings", self.default)
        values["head.tied"] = bool(source.head(self.prefix, f"{self.names.matrix}.weight", prefix + self.table, tie))
        values["head.transform"] = self.transform or values.get("feedforward.activation")
        values["head.bias"] = True

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["tie_word_embeddings"] = (config.head or Head()).tied


@dataclass(frozen=True)
class Pooler(Entry):
    """BERT's pooler, whose presence only the tensors tell."""

    prefix: str
    name: str = "pooler.dense"

    def read(self, source: Source, values: Values) -> None:
        values["pooler"] = source.has(f"{source.prefix(self.prefix)}{self.name}.weight")


@dataclass(frozen=True)
class Table:
    """Learned positions. RoBERTa's start one row after the padding id."""

    offset: int | None = 0
    """Rows that no position reads; None: `pad_token_id` + 1."""
    default: int = 512

    def read(self, source: Source, values: Values) -> None:
        offset = source.integer("pad_token_id", 1) + 1 if self.offset is None else self.offset
        values["position"] = Learned(offset=offset)
        values["max_len"] = source.integer("max_position_embeddings", self.default) - offset

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        if isinstance(config.position, Learned) and config.max_len is not None:
            data["max_position_embeddings"] = config.max_len + config.position.offset


@dataclass(frozen=True)
class Pad(Entry):
    """The default of `pad_token_id`."""

    id: int

    def read(self, source: Source, values: Values) -> None:
        source.data.setdefault("pad_token_id", self.id)


class PadBeforePositions:
    """RoBERTa's padding id, which is written as the one before the first row of positions."""

    def read(self, source: Source, values: Values) -> None:
        source.data.setdefault("pad_token_id", 1)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        offset, pad = lookup(config, "position.offset") or 0, config.special.pad
        if pad not in (None, offset - 1):
            raise WeightsError(
                f"special.pad={pad} cannot be written with position.offset={offset}: RoBERTa's positions start at the "
                f"padding id plus 1, so set special.pad={offset - 1}, or {SAVE_AS_GLASS}."
            )
        data["pad_token_id"] = offset - 1


@dataclass(frozen=True)
class Width:
    """The width of the embedding, and of the head that is tied to it. It comes after the head and the sizes."""

    name: str
    default: int
    always: bool
    """True: a projection follows the embedding even if the widths are equal."""
    output: str = ""
    """The key of the head's width, if the head has a width of its own."""
    output_default: int = 0

    def read(self, source: Source, values: Values) -> None:
        width = source.integer(self.name, self.default)
        if width != values["d_model"] or self.always:
            values["embedding.width"] = width
        if values.get("head", True) is not None:
            head = source.integer(self.output, self.output_default) if self.output else width
            if head != values["d_model"]:
                values["head.width"] = head

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data[self.name] = config.embedding_width
        if self.output:
            data[self.output] = config.head_width


@dataclass(frozen=True)
class Renamed(Entry):
    """A key under an old name, which is only read."""

    old: str
    new: str

    def read(self, source: Source, values: Values) -> None:
        if source.data.get(self.old) is not None:
            source.data.setdefault(self.new, source.data[self.old])


@dataclass(frozen=True)
class WithHead:
    """An entry about the head, for models that have one. It comes after the head."""

    entry: Entry

    def read(self, source: Source, values: Values) -> None:
        if values.get("head", True) is not None:
            self.entry.read(source, values)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        if config.head is not None:
            self.entry.write(config, data)


DROPOUT = Dropout("hidden_dropout_prob", "attention_probs_dropout_prob")
COMMON: tuple[Entry, ...] = (
    *(*SIZES, WIDTH, INIT, DROPOUT),
    only("position_embedding_type", "absolute", why="positions inside attention, which is not implemented"),
    only("is_decoder", False, why="a causal encoder, which is not implemented"),
    only("add_cross_attention", False, why="cross-attention, which is not implemented"),
)
"""The keys of BERT, without positions, segments and head."""
GELU = activation("hidden_act", "gelu")
EPS = eps(1e-12, "layer_norm_eps")


def segments(default: int = 2) -> Key:
    """Return the entry of the number of segments. transformers adds a segment embedding to every token."""

    def at_least_one(given: int) -> int:
        if given < 1:
            raise WeightsError(f"config.json has type_vocab_size={given}: this family needs at least one segment.")
        return given

    return integer("type_vocab_size", "embedding.n_segments", default, decode=at_least_one)


def names(
    block: Block,
    head: HeadNames,
    *,
    layers: str = "{p}encoder.layer.{i}",
    outside: Mapping[str, str] | None = None,
    table: str = WORDS,
) -> Callable[[ModelConfig], tuple[Row, ...]]:
    """Return the rows of an encoder. `outside` are modules that are in no block: our names, and theirs if they are not
    those of BERT."""
    rows: list[Row] = []
    for ours, theirs in {**OUTSIDE, **(outside or {})}.items():
        rows += linear(f"{{p}}{theirs}", ours)
    for ours, theirs_ in block.items():
        name, transform = (theirs_, IDENTITY) if isinstance(theirs_, str) else theirs_
        rows += linear(f"{layers}.{name}", *(f"{OURS}.{part}" for part in ours.split()), transform=transform)
    return lambda config: (*rows, *head.rows(config, f"{{p}}{table}"))


def bert_like(
    type: str,
    class_name: str,
    prefix: str,
    head: HeadNames,
    *entries: Entry,
    base: Mapping[str, Any] = BASE,
    block: Block = BERT,
    outside: Mapping[str, str] | None = None,
    rows: Callable[[ModelConfig], tuple[Row, ...]] | None = None,
    act: str = "gelu",
    pad: int = 0,
    offset: int | None = 0,
    norm_eps: float = 1e-12,
    n_segments: int = 2,
    transform: Activation | None = None,
    tied: bool = True,
    pooler: str = "pooler.dense",
    drops: tuple[Drop, ...] = IGNORED,
    **options: Any,
) -> Family:
    """Return a family with the keys of BERT and learned positions. `class_name` is the prefix of its classes.

    `act`, `pad`, `norm_eps`, `n_segments` and `tied` are defaults of keys. With `offset=None`, positions start after
    the padding id. With `pooler=""` or `n_segments=0`, the family has no pooler or no segments.
    """
    common: tuple[Entry, ...] = (
        *(*COMMON, activation("hidden_act", act), eps(norm_eps, "layer_norm_eps")),
        *(Pad(pad) if offset is not None else PadBeforePositions(), Table(offset)),
        *((segments(n_segments),) if n_segments else ()),
        MaskedHead(prefix, head, transform, default=tied),
        *((Pooler(prefix, pooler),) if pooler else ()),
    )
    return describe(
        type,
        (f"{class_name}ForMaskedLM", f"{class_name}Model"),
        base,
        (*common, *entries),
        rows or names(block, head, outside=outside),
        prefix=prefix,
        embed=WORDS,
        drops=drops,
        **options,
    )
