"""What a family is, and how its `config.json` is read: each value checked, used or refused, never ignored."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from glassformer.config import Activation, Head, ModelConfig, Special
from glassformer.weights.convert import Drop, Row
from glassformer.weights.errors import IN_OURS, WeightsError
from glassformer.weights.tensors import Tensors

# Foreign spellings of our activations, the one we write first.
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"),
    "relu": ("relu",),
    "silu": ("silu", "swish"),
    "relu2": ("relu2",),
    "tanh": ("tanh",),
}
_NEEDED = object()


@dataclass
class Source:
    """A foreign folder while it is read."""

    data: dict[str, Any]
    """config.json"""
    tensors: Tensors | None
    """None when the folder has no weights: the model is then taken to have its family's language-model head."""
    generation: dict[str, Any] = field(default_factory=dict)
    """generation_config.json"""
    notes: list[str] = field(default_factory=list)
    """What a user should know: parts dropped, settings that only matter in training."""

    def has(self, name: str) -> bool:
        return self.tensors is not None and name in self.tensors

    def prefix(self, prefix: str) -> str:
        """`prefix` when the names carry it, nothing when this is a bare base model."""
        if self.tensors is None or not prefix:
            return prefix
        return prefix if any(name.startswith(prefix) for name in self.tensors) else ""

    # Values of config.json, typed. An absent or null value is the default, or an error when there is none.

    def integer(self, key: str, default: Any = _NEEDED) -> Any:
        return self._value(key, default, int, "a whole number")

    def number(self, key: str, default: Any = _NEEDED) -> Any:
        value = self._value(key, default, (int, float), "a number")
        return float(value) if isinstance(value, int) else value

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, default, bool, "true or false")

    def text(self, key: str, default: Any = _NEEDED) -> str:
        return self._value(key, default, str, "a text")

    def _value(self, key: str, default: Any, kind: Any, words: str) -> Any:
        value = self.data.get(key)
        if value is None:
            if default is _NEEDED:
                raise WeightsError(f"config.json lacks {key!r}, which has no default: add it.")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise WeightsError(f"config.json has {key}={value!r}, which must be {words}.")
        return value

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Refuse a value that would change the arithmetic in a way that is not implemented."""
        value = self.data.get(key)
        if value is not None and value not in allowed:
            raise WeightsError(f"config.json has {key}={value!r}, {why}: only {key}={allowed[0]!r} is supported.")

    def activation(self, key: str, default: str) -> Activation:
        return read_activation(self.text(key, default), key)

    def dropout(self, *keys: str) -> float:
        """Our single dropout rate from the first key; a notice when the others differ."""
        values = [self.number(key, 0.0) for key in keys]
        if len(set(values)) > 1:
            listed = ", ".join(f"{k}={v}" for k, v in zip(keys, values, strict=True))
            self.notes.append(f"dropout rates differ ({listed}); {values[0]} is used for all, in training only.")
        return values[0]

    def special(self, vocab_size: int, start: int | None = None) -> Special:
        """Ids with a meaning; generation_config.json overrules config.json, ids outside the vocabulary are dropped."""

        def ids(key: str) -> list[int]:
            value = self.generation.get(key, self.data.get(key))
            listed = value if isinstance(value, list) else [] if value is None else [value]
            good = [v for v in listed if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocab_size]
            if len(good) < len(listed):
                self.notes.append(f"{key}={value!r} is not in the vocabulary of {vocab_size} ids and was left out.")
            return good

        def one(key: str) -> int | None:
            return next(iter(ids(key)), None)

        first = one("decoder_start_token_id")
        return Special(
            bos=one("bos_token_id"),
            eos=tuple(ids("eos_token_id")),
            pad=one("pad_token_id"),
            start=start if first is None else first,
        )

    def head(self, prefix: str, head: str, embed: str, tie: bool, **parts: Any) -> Head | None:
        """A language-model head, tied when config.json says so and the file does not hold two different tensors.

        transformers 5 rules the same way. A bare base model that does not tie has no head.
        """
        if self.has(head):
            assert self.tensors is not None
            if tie and embed in self.tensors and not self.tensors.equal(head, embed):
                self.notes.append(f"config.json ties the head, but {head} differs from {embed}: read as untied.")
                tie = False
            return Head(tied=tie, **parts)
        return Head(tied=True, **parts) if tie else Head(tied=False, **parts) if prefix else None


def read_activation(name: str, key: str) -> Activation:
    for ours, theirs in ACTIVATIONS.items():
        if name in theirs:
            return ours
    known = ", ".join(name for names in ACTIVATIONS.values() for name in names)
    raise WeightsError(f"config.json has {key}={name!r}, an activation that is not known. Known are {known}.")


def write_activation(activation: Activation) -> str:
    return ACTIVATIONS[activation][0]


def expect(value: object, kinds: Any, name: str, family: str) -> None:
    """Refuse to write a part of a kind that a family does not have."""
    if not isinstance(value, kinds):
        raise WeightsError(f"{name}={type(value).__name__} cannot be written as {family}: {IN_OURS}.")


def write_special(special: Special) -> dict[str, Any]:
    eos: Any = list(special.eos) if len(special.eos) > 1 else next(iter(special.eos), None)
    ids = {"bos_token_id": special.bos, "eos_token_id": eos, "pad_token_id": special.pad}
    return ids | ({} if special.start is None else {"decoder_start_token_id": special.start})


@dataclass(frozen=True)
class Family:
    """Models that share names and arithmetic: how to know them, read them and write them."""

    name: str
    types: tuple[str, ...]
    """Values of `model_type` whose arithmetic was compared with transformers. Others are refused: some share every
    key and tensor name with a family here and still compute something else (Gemma and Llama)."""
    keys: tuple[str, ...]
    """Keys of config.json that all members have."""
    marks: tuple[str, ...]
    """Names that members have, the prefix left out; one of them is enough."""
    prefix: str
    """Put before the base model's names when there is a head; '' when there never is one."""
    embed: str
    """Name of the token table."""
    rows: Callable[[ModelConfig], tuple[Row, ...]]
    drops: tuple[Drop, ...]
    read: Callable[[Source], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    """config.json; what it cannot express is found by reading it back (`families.to_hf`)."""
    foreign: tuple[str, ...] = ()
    """Beginnings of names that members never have, to tell families with the same keys apart."""
    respell: Callable[[str], str] | None = None
    """Old spellings of names to today's."""
    widen: Callable[[ModelConfig], ModelConfig] | None = None
    """A config with every bias that members always have; biases added by it are written as zeros."""
