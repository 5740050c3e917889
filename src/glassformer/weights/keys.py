"""Two-way tables between `config.json` and our config.

A family lists entries. Each entry reads a key of config.json into a field of our config and writes the field back, so
reading and writing cannot disagree. Fields have dotted names: `attention.n_heads`. What all members of a family share
is its `base`, the same nested table as in a model.toml. `describe` makes a `Family` of all this.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from glassformer.config import DecoderConfig, EncoderConfig, Head, ModelConfig, MoE, Seq2SeqConfig, from_dict
from glassformer.weights.convert import Drop, Row
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Family, Source, read_activation, write_activation, write_special

Values = dict[str, Any]
"""Fields of our config that were read so far, by dotted name. A name that starts with `_` is not a field."""

REQUIRED = object()


class Entry(Protocol):
    """One part of config.json, in both directions. An entry that is only read, or only written, inherits the other."""

    def read(self, source: Source, values: Values) -> None:
        """Add what config.json says to `values`."""
        return

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        """Add the keys for a config to `data`."""
        return


def same(value: Any) -> Any:
    """Return the value itself."""
    return value


def lookup(config: Any, field: str) -> Any:
    """Return the value of a dotted field; None if a part on the way does not exist."""
    for name in field.split("."):
        config = getattr(config, name, None)
    return config


def whole(value: float) -> float:
    """Return the whole number that a value is, up to rounding, or else the value."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value


Type = Literal["integer", "number", "flag", "text"]


@dataclass(frozen=True)
class Key:
    """A key of config.json and the field that it sets."""

    name: str
    field: str
    type: Type = "integer"
    default: Any = REQUIRED
    """The value in config.json if the key is absent, or a function of the values read so far that returns it. None
    leaves the field at its own default."""
    null: Any = None
    """What a null in config.json means: None leaves the field at its own default, `same` uses `default`."""
    decode: Callable[[Any], Any] = same
    encode: Callable[[Any], Any] = same
    get: Callable[[ModelConfig], Any] | None = None
    """Returns the value to encode, if it is not the field itself."""
    aliases: tuple[str, ...] = ()
    """Other names of the key, which are only read."""

    def read(self, source: Source, values: Values) -> None:
        name = next((name for name in (self.name, *self.aliases) if name in source.data), None)
        needed = self.null is same or self.default is REQUIRED
        if name is None or (source.data[name] is None and needed):
            if self.default is REQUIRED:
                raise WeightsError(f"config.json lacks {self.name!r}, which has no default: add it.")
            value = self.default(values) if callable(self.default) else self.default
        else:
            value = getattr(source, self.type)(name, None)
        if value is not None:
            values[self.field] = self.decode(value)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        value = self.get(config) if self.get else lookup(config, self.field)
        data[self.name] = None if value is None and self.type != "flag" else self.encode(value)


def integer(name: str, field: str, default: Any = REQUIRED, **options: Any) -> Key:
    return Key(name, field, "integer", default, **options)


def number(name: str, field: str, default: Any = REQUIRED, **options: Any) -> Key:
    return Key(name, field, "number", default, **options)


def flag(name: str, field: str, default: bool, yes: Any = True, no: Any = False, get: Any = None) -> Key:
    """Return the entry of a flag that chooses between two values of a field."""

    def decode(given: bool) -> Any:
        return yes if given else no

    return Key(name, field, "flag", default, null=same, decode=decode, encode=lambda held: held == yes, get=get)


def activation(name: str, default: str, field: str = "feedforward.activation", **synonyms: Any) -> Key:
    """Return the entry of an activation. `synonyms` are names that mean something else in this family."""

    def decode(given: str) -> Any:
        return synonyms[given] if given in synonyms else read_activation(given, name)

    def encode(held: Any) -> str:
        return next((theirs for theirs, ours in synonyms.items() if ours == held), None) or write_activation(held)

    get = _activation_of if field == "feedforward.activation" else None
    return Key(name, field, "text", default, decode=decode, encode=encode, get=get)


def _activation_of(config: ModelConfig) -> Any:
    part = config.feedforward.expert if isinstance(config.feedforward, MoE) else config.feedforward
    return getattr(part, "activation", None)


@dataclass(frozen=True)
class Only:
    """A key that must have one of these values, because the others select what is not implemented."""

    name: str
    allowed: tuple[Any, ...]
    why: str

    def read(self, source: Source, values: Values) -> None:
        source.only(self.name, *self.allowed, why=self.why)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data[self.name] = self.allowed[0]


def only(name: str, *allowed: Any, why: str) -> Only:
    return Only(name, allowed, why)


@dataclass(frozen=True)
class ReadOnly(Entry):
    """An entry that is not written."""

    entry: Entry

    def read(self, source: Source, values: Values) -> None:
        self.entry.read(source, values)


@dataclass(frozen=True)
class Constant(Entry):
    """A key that we write and do not read."""

    name: str
    value: Any

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data[self.name] = self.value(config) if callable(self.value) else self.value


@dataclass(frozen=True)
class Derived(Entry):
    """A field that follows from others. Writing checks nothing: the config that is read back is compared."""

    field: str
    value: Callable[[Values], Any]

    def read(self, source: Source, values: Values) -> None:
        values[self.field] = self.value(values)


@dataclass(frozen=True)
class Tied:
    """The output head: tied to the token table, or a matrix of its own."""

    prefix: str
    head: str
    embed: str
    default: bool

    def read(self, source: Source, values: Values) -> None:
        prefix = source.prefix(self.prefix)
        tie = source.flag("tie_word_embeddings", self.default)
        tied = source.head(prefix, self.head, prefix + self.embed, tie)
        values["head" if tied is None else "head.tied"] = tied

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["tie_word_embeddings"] = (config.head or Head(tied=False)).tied


@dataclass(frozen=True)
class SameAs:
    """A key that must have the value of a field, or `default`, because other values are not implemented."""

    name: str
    field: str
    why: str
    default: Any = None

    def read(self, source: Source, values: Values) -> None:
        source.only(self.name, values.get(self.field, self.default), why=self.why)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        value = lookup(config, self.field)
        data[self.name] = self.default if value is None else value


class Nested:
    """Entries of a table inside config.json."""

    def __init__(self, name: str, *entries: Entry):
        self.name, self.entries = name, entries

    def read(self, source: Source, values: Values) -> None:
        table = source.data.get(self.name) or {}
        if not isinstance(table, dict):
            raise WeightsError(f"config.json has {self.name}={table!r}, which must be a table.")
        for entry in self.entries:
            entry.read(Source(table, source.tensors), values)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data[self.name] = {}
        for entry in self.entries:
            entry.write(config, data[self.name])


@dataclass(frozen=True)
class Dropout:
    """Our single dropout rate, under these names."""

    names: tuple[str, ...]

    def __init__(self, *names: str):
        object.__setattr__(self, "names", names)

    def read(self, source: Source, values: Values) -> None:
        values["dropout"] = source.dropout(*self.names)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data |= dict.fromkeys(self.names, config.dropout)


SIZES = (
    integer("vocab_size", "vocab_size"),
    integer("hidden_size", "d_model"),
    integer("num_hidden_layers", "n_layers"),
    integer("num_attention_heads", "attention.n_heads"),
)
"""Sizes under the names that most families use."""
WIDTH = integer("intermediate_size", "feedforward.d_ff", get=lambda config: config.d_ff)
INIT = number("initializer_range", "init_std", 0.02)


def groups(default: Any = None) -> Key:
    """Return the entry of the number of key/value heads. Default: as many as query heads."""
    return integer("num_key_value_heads", "attention.n_kv_heads", default, get=lambda config: config.n_kv_heads)


def head_dim(default: Any = None) -> Key:
    """Return the entry of the width of a head. Default: D/H."""
    return integer("head_dim", "attention.d_head", default, get=lambda config: config.d_head)


def eps(default: float, name: str = "rms_norm_eps") -> Key:
    """Return the entry of the norm's epsilon."""
    return number(name, "norm.eps", default, null=same)


def max_len(default: int, name: str = "max_position_embeddings") -> Key:
    """Return the entry of the longest context."""
    return integer(name, "max_len", default, get=lambda config: config.max_len or default)


def nested(base: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return `base` with the values added, as a nested table."""
    table = copy.deepcopy(dict(base))
    if values.get("head", True) is None:
        table["head"] = "none"
        values = {name: value for name, value in values.items() if name.split(".")[0] != "head"}
    for field, value in values.items():
        *parts, last = field.split(".")
        if field.startswith("_") or (parts and parts[0] in values):  # a whole part was read
            continue
        inner = table
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return table


def simplified(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table without sizes that are equal to our defaults."""
    attention, d_model = table["attention"], table["d_model"]
    n_heads = attention["n_heads"]
    if n_heads < 1:
        return table  # the config refuses it
    d_head = attention.get("d_head") or d_model // n_heads
    usual = {"n_kv_heads": n_heads, "d_value": d_head} | ({"d_head": d_head} if d_head * n_heads == d_model else {})
    table["attention"] = {key: value for key, value in attention.items() if key not in usual or value != usual[key]}
    return table


MOST_LAYERS = 10_000
"""Entries make lists of the layers before any weights are looked at: a wrong number must not fill the memory."""


def _refuse_many_layers(values: Values) -> None:
    for field in ("n_layers", "n_encoder_layers"):
        if (layers := values.get(field) or 0) > MOST_LAYERS:
            raise WeightsError(f"config.json has {layers} layers, more than {MOST_LAYERS:,}: correct the number.")


@dataclass(frozen=True)
class Description:
    """Reads and writes config.json with the entries of one family."""

    type: str
    classes: tuple[str, str]
    """Names of the transformers classes with and without a head."""
    base: Mapping[str, Any]
    entries: tuple[Entry, ...]

    def read(self, source: Source) -> ModelConfig:
        values: Values = {}
        for entry in self.entries:
            entry.read(source, values)
            _refuse_many_layers(values)
        values["special"] = source.special(values["vocab_size"])
        return from_dict(simplified(nested(self.base, values)))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        data: dict[str, Any] = {
            "architectures": [self.classes[0 if config.head else 1]],
            "model_type": self.type,
        }
        for entry in self.entries:
            entry.write(config, data)
        special = write_special(config.special)
        return data | {name: id for name, id in special.items() if id is not None or data.get(name) is None}


KINDS: dict[str, type[ModelConfig]] = {"decoder": DecoderConfig, "encoder": EncoderConfig, "seq2seq": Seq2SeqConfig}


def describe(
    type: str,
    classes: tuple[str, str],
    base: Mapping[str, Any],
    entries: Iterable[Entry],
    rows: Callable[[ModelConfig], tuple[Row, ...]] | tuple[Row, ...],
    *,
    prefix: str = "model.",
    embed: str = "embed_tokens.weight",
    drops: tuple[Drop, ...] = (),
    aliases: tuple[str, ...] = (),
    name: str = "",
    keys: tuple[str, ...] = (),
    typical_names: tuple[str, ...] = (),
    kinds: tuple[type[ModelConfig], ...] = (),
    **options: Any,
) -> Family:
    """Return the family of one `model_type` (and of `aliases`, which compute the same).

    With `keys`, a config.json without a `model_type` can be recognised by them. `options` are fields of `Family`.
    """
    described = Description(type, classes, base, tuple(entries))
    return Family(
        name=name or type,
        types=(type, *aliases),
        keys=keys,
        typical_names=typical_names or (embed,),
        prefix=prefix,
        embed=embed,
        rows=rows if callable(rows) else lambda config: rows,
        drops=drops,
        read=described.read,
        write=described.write,
        needs_type=not keys,
        kinds=kinds or (KINDS[base.get("kind", "decoder")],),
        **options,
    )
