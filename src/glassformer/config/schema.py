"""Convert configs to plain dicts and TOML and back, and change some fields of a config."""

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from glassformer.config.experts import MoE
from glassformer.config.model import MODEL_KINDS, ModelConfig
from glassformer.config.parts import Special
from glassformer.errors import ConfigError, listing, nearest


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as a plain nested dict. Variants carry their `kind`; None is left out where it is the default."""
    out: dict[str, Any] = {"kind": config.kind} if hasattr(config, "kind") else {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            out[f.name] = to_dict(value)
        elif value is None:
            if f.default is not None:  # TOML has no null
                out[f.name] = "none"
        elif isinstance(value, tuple):
            items = [to_dict(item) if dataclasses.is_dataclass(item) else item for item in value]
            if items or _table_type(f.type) is None:
                out[f.name] = items
        else:
            out[f.name] = value
    return out


def from_dict(data: dict[str, Any]) -> ModelConfig:
    """Return the config of a dict; the inverse of `to_dict`. Raises ConfigError, which names the invalid key."""
    if not isinstance(data, dict):
        raise ConfigError(f"a model config is a table of fields, got {type(data).__name__}.")
    kind = data.get("kind", "decoder")
    if kind not in MODEL_KINDS:
        raise ConfigError(f"model kind={kind!r} is not known. Use one of {', '.join(map(repr, MODEL_KINDS))}.")
    return build(MODEL_KINDS[kind], data, "model")


T = TypeVar("T")


def build(cls: type[T], data: dict[str, Any], where: str) -> T:
    """Return a dataclass made of a table. `where` is what error messages call the table."""
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    # `kind` chose this variant and is usually not a field, but a dataclass may have a field of that name
    data = {key: value for key, value in data.items() if key != "kind" or key in names}
    for key in data:
        if key not in names:
            raise ConfigError(f"{where}.{key} is not a field.{nearest(key, names)}")
    values = {key: _convert(hints[key], value, f"{where}.{key}") for key, value in data.items()}
    required = [
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if required:
        raise ConfigError(f"{where} lacks {listing(required, 'and')}: no default exists.")
    try:
        return cls(**values)
    except ConfigError as error:  # a field is called as in the file, loop.steps, and not after its class
        text = str(error)
        raise ConfigError(
            f"{where}{text.removeprefix(cls.__name__)}" if text.startswith(f"{cls.__name__}.") else text
        ) from None


def _convert(hint: Any, value: Any, where: str) -> Any:
    options = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    if type(None) in options and (value is None or value == "none"):
        return None
    classes = [o for o in options if dataclasses.is_dataclass(o)]
    if (item := _table_type(hint)) is not None:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}={value!r} must be a list of tables.")
        return tuple(_convert(item, part, f"{where}[{i}]") for i, part in enumerate(value))
    if classes:
        if dataclasses.is_dataclass(value):
            return value
        if not isinstance(value, dict):
            raise ConfigError(f"{where}={value!r} must be a table of fields.")
        return build(_variant(classes, value, where), value, where)
    for option in options:
        converted = _scalar(option, value)
        if converted is not _NO:
            return converted
    raise ConfigError(f"{where}={value!r} has the wrong type: expected {_type_name(options)}.")


def _table_type(hint: Any) -> Any:
    """Return the type of the tables that a field lists: Part of tuple[Part, ...]; None for any other field."""
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    return item if dataclasses.is_dataclass(item) else None


def _variant(classes: list[Any], value: dict[str, Any], where: str) -> Any:
    if len(classes) == 1 and not hasattr(classes[0], "kind"):
        return classes[0]
    kinds = {c.kind: c for c in classes}
    kind = value.get("kind", next(iter(kinds)) if len(kinds) == 1 else None)
    former = {old: c for c in classes for old in getattr(c, "former_kinds", ())}
    if kind not in kinds and kind not in former:
        raise ConfigError(f"{where}.kind={kind!r} is not known. Use one of {', '.join(map(repr, kinds))}.")
    return kinds[kind] if kind in kinds else former[kind]


_NO = object()


def _scalar(option: Any, value: Any) -> Any:
    if typing.get_origin(option) is Literal:
        return value if value in typing.get_args(option) else _NO
    if typing.get_origin(option) is tuple:
        item = typing.get_args(option)[0]
        return tuple(value) if isinstance(value, list | tuple) and all(type(v) is item for v in value) else _NO
    if option is float and type(value) is int:
        return float(value)
    return value if type(value) is option else _NO


def _type_name(options: Any) -> str:
    names = []
    for option in options:
        if typing.get_origin(option) is Literal:
            names.append(f"one of {', '.join(map(repr, typing.get_args(option)))}")
        elif option is not type(None):
            is_list = typing.get_origin(option) is tuple
            texts = "a list of texts" if is_list and typing.get_args(option)[0] is str else "a list of whole numbers"
            names.append(texts if is_list else _TYPE_WORDS.get(option, str(option)))
    return " or ".join(names)


_TYPE_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def replace(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Return `config` with some fields changed. A field of a part needs no prefix if only one part has it.

    replace(cfg, n_layers=2, n_heads=4, d_ff=64) reaches into attention and feedforward; `attention__bias=False` spells
    out the part when the name alone is ambiguous.
    """
    own = {f.name for f in dataclasses.fields(config)}
    nested: dict[str, dict[str, Any]] = {}
    direct: dict[str, Any] = {}
    for key, value in changes.items():
        if key in own:
            direct[key] = value
            continue
        part, _, name = key.rpartition("__")
        holders = [part] if part else [p for p in own if _has_field(getattr(config, p), key)]
        if len(holders) != 1 or not _has_field(getattr(config, holders[0], None), name):
            leaves = {
                f.name
                for p in own
                if dataclasses.is_dataclass(getattr(config, p))
                for f in dataclasses.fields(getattr(config, p))
            }
            hint = (
                f" Spell it {listing([f'{h}__{key}' for h in sorted(holders)])}."
                if len(holders) > 1
                else nearest(key, own | leaves)
            )
            raise ConfigError(f"{key} is not one field of {type(config).__name__}.{hint}")
        nested.setdefault(holders[0], {})[name] = value
    for part, values in nested.items():
        held = direct.get(part, getattr(config, part))
        if held is None:
            raise ConfigError(f"{next(iter(values))} belongs to {part}, which is None here: give {part} itself.")
        direct[part] = dataclasses.replace(held, **values)
    return dataclasses.replace(config, **direct)


def _has_field(part: Any, name: str) -> bool:
    return dataclasses.is_dataclass(part) and name in {f.name for f in dataclasses.fields(part)}


_WIDTHS = {"d_ff", "feedforward", "feedforward__d_ff", "expert", "feedforward__expert"}  # they say F themselves


def vary(config: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    """`config` with `changes`; what belongs to the published width, depth or vocabulary is fitted to the new one."""
    width = changes.get("d_model")
    if isinstance(width, int) and width > 0:  # the config refuses any other
        changes = {**_scales(config, width, changes), **changes}
        config = config if changes.keys() & _WIDTHS else _wider(config, width / config.d_model)
    vocab = changes.get("vocab_size")
    if isinstance(vocab, int) and "special" not in changes:
        # The ids belong to the published vocabulary: gpt2(vocab_size=256) has no token 50256 to stop at.
        ids = dataclasses.asdict(config.special)
        inside: dict[str, Any] = {n: t for n, t in ids.items() if isinstance(t, int) and t < vocab}
        inside |= {n: tuple(t for t in ids[n] if t < vocab) for n in ("eos", "suppressed")}
        config = dataclasses.replace(config, special=Special(**inside))
    return replace(config, **{**_layers_left(config, changes), **changes})


def _scales(config: ModelConfig, width: int, changes: dict[str, Any]) -> dict[str, Any]:
    """The scales that belong to the width: sqrt(D) of the embedding and 1/sqrt(D) of the head."""
    out: dict[str, Any] = {}
    if config.embedding.scale == math.sqrt(config.d_model) and "embedding" not in changes:
        out["embedding__scale"] = math.sqrt(width)
    if config.head is not None and config.head.scale == config.d_model**-0.5 and "head" not in changes:
        out["head__scale"] = width**-0.5
    return out


def _layers_left(config: ModelConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """The layers with a window, and the layer kinds, of a model that is less deep."""
    depth, attention = changes.get("n_layers"), config.attention
    if not isinstance(depth, int) or depth >= config.n_layers:
        return {}
    left: dict[str, Any] = {}
    if attention.window_layers is not None and not changes.keys() & {"attention", "window", "attention__window"}:
        left["attention__window_layers"] = tuple(layer for layer in attention.window_layers if layer < depth)
    if config.layer_kinds:
        kept = [(kind, tuple(layer for layer in kind.layers if layer < depth)) for kind in config.layer_kinds]
        left["layer_kinds"] = tuple(dataclasses.replace(kind, layers=layers) for kind, layers in kept if layers)
    return left


def _wider(config: ModelConfig, ratio: float) -> ModelConfig:
    kinds = tuple(
        kind if kind.feedforward is None else dataclasses.replace(kind, feedforward=_widened(kind.feedforward, ratio))
        for kind in config.layer_kinds
    )
    return dataclasses.replace(config, feedforward=_widened(config.feedforward, ratio), layer_kinds=kinds)


def _widened(part: Any, ratio: float) -> Any:
    """A feed-forward, or the experts of one, `ratio` times as wide, to the nearest whole number."""
    if isinstance(part, MoE):
        shared = None if part.shared is None else _widened(part.shared, ratio)
        return dataclasses.replace(part, expert=_widened(part.expert, ratio), shared=shared)
    return dataclasses.replace(part, d_ff=max(1, round(part.d_ff * ratio)))


def to_toml(data: dict[str, Any]) -> str:
    """Return nested tables of plain values as TOML, which `tomllib` reads back to the same dict."""
    return "\n".join(_toml_table(data, ())).strip() + "\n"


def _toml_table(data: dict[str, Any], path: tuple[str, ...], listed: bool = False) -> list[str]:
    """Return the lines of a table; `listed`: it is one item of a list of tables, which TOML writes [[name]]."""
    tables = {key: value for key, value in data.items() if isinstance(value, dict) or _lists_tables(value)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in data.items() if key not in tables]
    if path and (lines or not data or listed):
        name = ".".join(path)
        lines = ["", f"[[{name}]]" if listed else f"[{name}]", *lines]
    for key, value in tables.items():
        for part in [value] if isinstance(value, dict) else value:
            lines += _toml_table(part, (*path, key), listed=not isinstance(value, dict))
    return lines


def _lists_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            text = repr(value)
            return text if any(c in text for c in ".einf") else text + ".0"
        case str():
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
        case list() | tuple():
            return "[" + ", ".join(map(_toml_value, value)) + "]"
    raise TypeError(f"{value!r} has no TOML form here")


def from_toml(text: str, source: str = "the TOML text") -> ModelConfig:
    """Return the model config of a TOML text: the whole document, or its [model] table if it has one."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not readable TOML: {error}.") from None
    return from_dict(data.get("model", data))


def merge_tables(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes`. Tables are merged; a table with another `kind` replaces the old one."""
    out = dict(base)
    for key, value in changes.items():
        held = out.get(key)
        if isinstance(held, Mapping) and isinstance(value, Mapping) and value.get("kind") in (None, held.get("kind")):
            out[key] = merge_tables(held, value)
        else:
            out[key] = value
    return out
