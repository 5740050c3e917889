"""The description of a model family, and reading of `config.json`: each value is validated and used, or rejected."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from glassformer.config import Activation, DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, Special
from glassformer.weights.convert import Drop, Row
from glassformer.weights.errors import WeightsError
from glassformer.weights.tensors import Tensors

# Hugging Face names of each activation; the first one is the name that is written.
ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "gelu": ("gelu", "gelu_python"),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"),
    "relu": ("relu",),
    "silu": ("silu", "swish"),
    "relu2": ("relu2",),
    "tanh": ("tanh",),
    "quick_gelu": ("quick_gelu",),
}
_REQUIRED = object()


@dataclass
class Source:
    """The contents of a Hugging Face folder, with typed access to the values of config.json."""

    data: dict[str, Any]
    """config.json"""
    tensors: Tensors | None
    """None if the folder has no weights: the model is then assumed to have the language-model head of its family."""
    generation: dict[str, Any] = field(default_factory=dict)
    """generation_config.json"""
    notes: list[str] = field(default_factory=list)
    """Notes for the user: dropped tensors, settings that only affect training."""

    def has(self, name: str) -> bool:
        """Return True if the weights contain a tensor of this name."""
        return self.tensors is not None and name in self.tensors

    def prefix(self, prefix: str) -> str:
        """Return `prefix` if the tensor names start with it, and '' for a bare base model."""
        if self.tensors is None or not prefix:
            return prefix
        return prefix if any(name.startswith(prefix) for name in self.tensors) else ""

    # Typed values of config.json. For an absent or null value the default is returned; without one it is an error.

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._value(key, default, int, "a whole number")

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self._value(key, default, (int, float), "a number")
        return float(value) if isinstance(value, int) else value

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, default, bool, "true or false")

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        return self._value(key, default, str, "a text")

    def _value(self, key: str, default: Any, kind: Any, words: str) -> Any:
        value = self.data.get(key)
        if value is None:
            if default is _REQUIRED:
                raise WeightsError(f"config.json lacks {key!r}, which has no default: add it.")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise WeightsError(f"config.json has {key}={value!r}, which must be {words}.")
        return value

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Raise WeightsError if the value is not allowed, because it selects something that is not implemented."""
        value = self.data.get(key)
        if value is not None and value not in allowed:
            raise WeightsError(f"config.json has {key}={value!r}, {why}: only {key}={allowed[0]!r} is supported.")

    def activation(self, key: str, default: str) -> Activation:
        return read_activation(self.text(key, default), key)

    def dropout(self, *keys: str) -> float:
        """Return our single dropout rate, that of the first key; add a note if the others differ."""
        values = [self.number(key, 0.0) for key in keys]
        if len(set(values)) > 1:
            listed = ", ".join(f"{k}={v}" for k, v in zip(keys, values, strict=True))
            self.notes.append(f"dropout rates differ ({listed}); {values[0]} is used for all, in training only.")
        return values[0]

    def special(self, vocab_size: int) -> Special:
        """Return the special token ids, generation_config.json first; ids outside the vocabulary are ignored."""

        def ids(key: str) -> list[int]:
            value = self.generation.get(key, self.data.get(key))
            listed = value if isinstance(value, list) else [] if value is None else [value]
            good = [v for v in listed if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < vocab_size]
            if len(good) < len(listed):
                self.notes.append(f"{key}={value!r} is not in the vocabulary of {vocab_size} ids and was ignored.")
            return good

        def one(key: str) -> int | None:
            return next(iter(ids(key)), None)

        return Special(
            bos=one("bos_token_id"),
            eos=tuple(ids("eos_token_id")),
            pad=one("pad_token_id"),
            start=one("decoder_start_token_id"),
            forced_bos=one("forced_bos_token_id"),
            forced_eos=one("forced_eos_token_id"),
            suppressed=self._suppressed(vocab_size),
        )

    def _suppressed(self, vocab_size: int) -> tuple[int, ...]:
        """Return the tokens that are never generated: `suppress_tokens`, and `bad_words_ids` of one token."""
        words = self.generation.get("bad_words_ids", self.data.get("bad_words_ids")) or []
        listed = self.generation.get("suppress_tokens", self.data.get("suppress_tokens")) or []
        single = [word[0] for word in words if isinstance(word, list) and len(word) == 1]
        if len(single) < len(words):
            self.notes.append("bad_words_ids has sequences of several tokens, which generation does not suppress.")
        found = {t for t in (*listed, *single) if isinstance(t, int) and 0 <= t < vocab_size}
        return tuple(sorted(found))

    def head(self, prefix: str, head: str, embed: str, tie: bool) -> bool | None:
        """Return whether the head is tied: if config.json says so and the file has no different head tensor.

        This is the rule of transformers 5. A bare base model that is not tied has no head: None.
        """
        if self.has(head):
            assert self.tensors is not None
            if tie and embed in self.tensors and not self.tensors.equal(head, embed):
                self.notes.append(f"config.json ties the head, but {head} differs from {embed}: it is read as untied.")
                tie = False
            return tie
        return tie if tie or prefix else None


def read_activation(name: str, key: str) -> Activation:
    for ours, theirs in ACTIVATIONS.items():
        if name in theirs:
            return ours
    known = ", ".join(name for names in ACTIVATIONS.values() for name in names)
    raise WeightsError(f"config.json has {key}={name!r}, an activation that is not known. Known are {known}.")


def write_activation(activation: Activation) -> str:
    return ACTIVATIONS[activation][0]


def write_special(special: Special) -> dict[str, Any]:
    eos: Any = list(special.eos) if len(special.eos) > 1 else next(iter(special.eos), None)
    ids = {"bos_token_id": special.bos, "eos_token_id": eos, "pad_token_id": special.pad}
    others = {
        "decoder_start_token_id": special.start,
        "forced_bos_token_id": special.forced_bos,
        "forced_eos_token_id": special.forced_eos,
        "bad_words_ids": [[token] for token in special.suppressed] or None,
    }
    return ids | {key: value for key, value in others.items() if value is not None}


@dataclass(frozen=True)
class Family:
    """A family of models with common tensor names: how to detect, read and write them."""

    name: str
    types: tuple[str, ...]
    """Supported values of `model_type`, each compared with transformers. Others are rejected, because some models have
    the same keys and tensor names but compute something else (Gemma and Llama)."""
    keys: tuple[str, ...]
    """Keys of config.json that all members have."""
    typical_names: tuple[str, ...]
    """Tensor names without the prefix, of which every member has at least one."""
    prefix: str
    """Prefix of the tensors of the base model in a model with a head; '' if there is none."""
    embed: str
    """Name of the token table."""
    rows: Callable[[ModelConfig], tuple[Row, ...]]
    drops: tuple[Drop, ...]
    read: Callable[[Source], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    """Returns config.json. `families.to_hf` reads it back to find what it cannot represent."""
    excluded_prefixes: tuple[str, ...] = ()
    """Prefixes of tensor names that no member has, to distinguish families with the same keys."""
    update_name: Callable[[str], str] | None = None
    """Converts old tensor names to current ones."""
    add_biases: Callable[[ModelConfig], ModelConfig] | None = None
    """Returns the config with every bias that members always have; added biases are written as zeros."""
    needs_type: bool = False
    """True if only `model_type` identifies the family, because others have the same keys and tensor names."""
    kinds: tuple[type[ModelConfig], ...] = (DecoderConfig, EncoderConfig, Seq2SeqConfig)
    """Kinds of models that can be members."""
