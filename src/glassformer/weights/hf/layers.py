"""Entries of config.json about positions and kinds of layers: rotary tables, windows, layers without rotation."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from glassformer.config import LayerKind, ModelConfig, NoPosition, Rotary
from glassformer.config.position import WaveLayout
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Source
from glassformer.weights.keys import Values
from glassformer.weights.rope import read_rope, rope_of, rope_table, write_rope

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Rope:
    """Rotary positions, the same in all layers. `fraction` is the default of `partial_rotary_factor`, if it exists."""

    theta: float = 10000.0
    pairing: WaveLayout = "halves"
    fraction: float | None = None
    old: Mapping[str, str] = field(default_factory=dict)
    """Names of keys in older files, and the names they have now."""

    def read(self, source: Source, values: Values) -> None:
        renamed = {new: source.data[key] for key, new in self.old.items() if key in source.data}
        if "rope_parameters" not in source.data:
            source = dataclasses.replace(source, data=renamed | source.data)
        values["position"] = read_rope(source, values.get("max_len"), self.theta, self.pairing, self.fraction)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        if isinstance(config.position, Rotary):
            data |= write_rope(config.position, config.d_head, with_fraction=self.fraction is not None)


Types = Callable[[int, Source], list[str]]
"""The default layer types of a family, for this number of layers."""


def every(n: int, key: str = "") -> Types:
    """Return the layer types in which every n-th layer has full attention and the others slide.

    `key` is the key of config.json that changes n.
    """

    def types(layers: int, source: Source) -> list[str]:
        step = source.integer(key, n) if key else n
        return [FULL if step < 1 or (i + 1) % step == 0 else SLIDING for i in range(layers)]

    return types


def all_full(layers: int, source: Source) -> list[str]:
    return [FULL] * layers


def all_sliding(layers: int, source: Source) -> list[str]:
    return [SLIDING] * layers


def from_layer(default: int, switch: str = "") -> Types:
    """Return the layer types in which the layers from `max_window_layers` on slide, if there is a window.

    `switch` is a key that must be true for windows to be used.
    """

    def types(layers: int, source: Source) -> list[str]:
        first, on = source.integer("max_window_layers", default), not switch or source.flag(switch, False)
        on = on and bool(source.data.get("sliding_window", True))
        return [SLIDING if on and i >= first else FULL for i in range(layers)]

    return types


@dataclass(frozen=True)
class Windows:
    """Windows of the layers that `layer_types` calls sliding."""

    width: int | None
    """The default of `sliding_window`."""
    types: Types | None = None
    """The default of `layer_types`; None: the family has no such key, and all layers slide if there is a window."""
    switch: str = ""
    """A key that must be true for windows to be used."""
    may_be_null: bool = False
    """True if a null window means that all layers have full attention."""

    def read(self, source: Source, values: Values) -> None:
        width = source.integer("sliding_window", None if "sliding_window" in source.data else self.width)
        n = values["n_layers"]
        if self.switch and not source.flag(self.switch, False):
            width = None
        if self.types is None:
            source.only("layer_types", None, [SLIDING] * n, why="windows in some layers only")
        if width is None and (self.may_be_null or self.types is None):
            values["_types"] = [FULL] * n
            return
        types = layer_types(source, n, self.types(n, source) if self.types else [SLIDING] * n)
        values["_types"] = types
        layers = tuple(i for i, kind in enumerate(types) if kind == SLIDING)
        if not layers:
            return
        if width is None:
            needed = f"sliding_window and {self.switch}" if self.switch else "sliding_window"
            raise WeightsError(f"config.json has layers of type 'sliding_attention' but no window: set {needed}.")
        values["attention.window"] = width
        values["attention.window_layers"] = None if len(layers) == n else layers

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        windows = [config.window(layer) for layer in range(config.n_layers)]
        data["sliding_window"] = config.attention.window
        if self.types:
            data["layer_types"] = [SLIDING if w else FULL for w in windows]
            data["sliding_window"] = config.attention.window or (None if self.may_be_null else self.width)
        if self.switch:
            data[self.switch] = any(windows)


def layer_types(source: Source, n_layers: int, default: list[str]) -> list[str]:
    """Return the type of each layer, after validation."""
    types = source.data.get("layer_types") or default
    if not isinstance(types, list) or len(types) != n_layers or any(t not in (FULL, SLIDING) for t in types):
        raise WeightsError(
            f"config.json has layer_types={types!r}, which must name 'full_attention' or 'sliding_attention' for each "
            f"of the {n_layers} layers."
        )
    return types


@dataclass(frozen=True)
class RopeByType:
    """Rotary positions that depend on the type of the layer. It comes after `Windows`, which reads the types."""

    full: float
    """Default base of layers with full attention."""
    sliding: float
    sliding_key: str = ""
    """The key of the base of sliding layers in old files; empty: it was always the default."""

    def read(self, source: Source, values: Values) -> None:
        tables = source.data.get("rope_parameters")
        nested = isinstance(tables, dict) and bool(tables.keys() & {FULL, SLIDING})
        max_len = values.get("max_len")
        if nested:
            assert isinstance(tables, dict)
            full = rope_of(tables.get(FULL) or {}, source, max_len, self.full)
            sliding = rope_of(tables.get(SLIDING) or {}, source, max_len, self.sliding)
        else:
            full = read_rope(source, max_len, self.full)
            base = source.number(self.sliding_key, self.sliding) if self.sliding_key else self.sliding
            sliding = Rotary(base=base)
        values["position"] = full
        layers = tuple(i for i, kind in enumerate(values["_types"]) if kind == SLIDING)
        if layers and sliding != full:
            values["layer_kinds"] = (LayerKind(layers, position=sliding),)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        windows = [config.window(layer) for layer in range(config.n_layers)]
        held = [config.layer_position(layer) for layer in range(config.n_layers)]
        tables = {}
        for name, wanted, default in ((FULL, False, self.full), (SLIDING, True, self.sliding)):
            found = [p for p, w in zip(held, windows, strict=True) if bool(w) == wanted and isinstance(p, Rotary)]
            tables[name] = rope_table(found[0] if found else Rotary(base=default), config.d_head)
        data["rope_parameters"] = tables


@dataclass(frozen=True)
class RotatedLayers:
    """Layers without rotation. `read_layers` returns True for each layer that rotates."""

    read_layers: Callable[[Source, Values], list[bool]]
    write_layers: Callable[[list[bool]], dict[str, Any]] = field(default=lambda rotated: {})

    def read(self, source: Source, values: Values) -> None:
        still = tuple(i for i, rotated in enumerate(self.read_layers(source, values)) if not rotated)
        if still:
            values["layer_kinds"] = (*values.get("layer_kinds", ()), LayerKind(still, position=NoPosition()))

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data |= self.write_layers([isinstance(config.layer_position(i), Rotary) for i in range(config.n_layers)])
