"""Entries and memory layouts of mixtures of experts."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glassformer.config import Dense, Gated, LayerKind, ModelConfig, MoE, Router
from glassformer.weights.convert import Row, Shape, Transform, linear
from glassformer.weights.family import Source
from glassformer.weights.hf.layouts import OURS
from glassformer.weights.keys import Values, lookup


class TwoWay(NamedTuple):
    """How something is read from config.json, and written to it."""

    read: Callable[..., Any]
    write: Callable[..., dict[str, Any]]


EVERYWHERE = TwoWay(lambda source, values: [True] * values["n_layers"], lambda sparse: {})
"""Experts in all layers."""
NO_SHARED = TwoWay(lambda source, width: 0, lambda shared, width: {})
"""No shared expert."""


def fixed(**fields: Any) -> TwoWay:
    """Return a router with fields that all members of a family share."""
    return TwoWay(lambda source: fields, lambda router: {})


def after_first(key: str, default: int) -> TwoWay:
    """Return the layers with experts, by a key that counts the dense layers before the first of them."""

    def read(source: Source, values: Values) -> list[bool]:
        first = source.integer(key, default)
        return [i >= first for i in range(values["n_layers"])]

    return TwoWay(read, lambda sparse: {key: sparse.index(True) if True in sparse else len(sparse)})


def shared_times(key: str, default: int) -> TwoWay:
    """Return the width of a shared expert that is as wide as this number of experts."""
    return TwoWay(
        lambda source, width: width * source.integer(key, default), lambda shared, width: {key: shared // width}
    )


def shared_width(key: str, default: int) -> TwoWay:
    """Return the width of a shared expert, under a key of its own."""
    return TwoWay(lambda source, width: source.integer(key, default), lambda shared, width: {key: shared})


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts in some layers, and dense gated layers of another width in the others.

    Keys have the default that follows them. It comes after the entries of the activation and of the bias of the
    feed-forward, whose values it uses.
    """

    experts: tuple[str, int]
    active: tuple[str, int]
    width: tuple[str, int]
    """The width of an expert."""
    aliases: tuple[str, ...] = ()
    """Other names of the number of experts."""
    normalize: tuple[str, bool] = ("", True)
    """The key that normalizes the weights of the chosen experts; the empty name: always the value that follows."""
    router: TwoWay = fixed()
    """Reads (source) -> fields of the router; writes (router) -> keys."""
    shared: TwoWay = NO_SHARED
    """Reads (source, width of an expert) -> width of the shared expert, 0 for none; writes (both widths) -> keys."""
    shared_gate: bool = False
    sparse: TwoWay = EVERYWHERE
    """Reads (source, values) -> whether each layer has experts; writes (this list) -> keys."""
    gated: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a gated layer other than width and bias."""
    bias: bool = False
    expert_bias: bool = True
    """False: the bias of the feed-forward is that of the shared expert and of dense layers, and experts have none."""

    def read(self, source: Source, values: Values) -> None:
        act, bias = values.pop("feedforward.activation", "silu"), values.pop("feedforward.bias", self.bias)
        count = next((key for key in (self.experts[0], *self.aliases) if key in source.data), self.experts[0])
        normalize = source.flag(*self.normalize) if self.normalize[0] else self.normalize[1]
        width = source.integer(*self.width)
        options: dict[str, Any] = {"activation": act, "bias": bias, **self.gated}
        shared = self.shared.read(source, width)
        mixture = MoE(
            source.integer(count, self.experts[1]),
            source.integer(*self.active),
            Gated(width, **(options if self.expert_bias else {**options, "bias": False})),
            normalize=normalize,
            router=Router(**self.router.read(source)),
            shared=Gated(shared, **options) if shared else None,
            shared_gate=self.shared_gate and bool(shared),
        )
        where = self.sparse.read(source, values)
        dense = tuple(i for i, sparse in enumerate(where) if not sparse)
        values["feedforward"] = mixture if any(where) else Gated(source.integer("intermediate_size"), **options)
        if dense and any(where):
            other = LayerKind(dense, feedforward=Gated(source.integer("intermediate_size"), **options))
            values["layer_kinds"] = (*values.get("layer_kinds", ()), other)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        parts = [config.layer_feedforward(layer) for layer in range(config.n_layers)]
        mixture = next((part for part in parts if isinstance(part, MoE)), None)
        dense = next((part for part in parts if isinstance(part, Gated | Dense)), None)
        if mixture is None:
            return
        width = mixture.expert.d_ff
        data |= {self.experts[0]: mixture.n_experts, self.active[0]: mixture.n_active}
        data |= {"intermediate_size": width if dense is None else dense.d_ff, self.width[0]: width}
        data |= {self.normalize[0]: mixture.normalize} if self.normalize[0] else {}
        data |= self.router.write(mixture.router)
        data |= self.shared.write(mixture.shared.d_ff if mixture.shared else 0, width)
        data |= self.sparse.write([isinstance(part, MoE) for part in parts])


@dataclass(frozen=True)
class Limit:
    """The limit of the gated experts. It comes after the entry of the mixture."""

    name: str
    default: float

    def read(self, source: Source, values: Values) -> None:
        mixture = values["feedforward"]
        expert = dataclasses.replace(mixture.expert, limit=source.number(self.name, self.default))
        values["feedforward"] = dataclasses.replace(mixture, expert=expert)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data[self.name] = lookup(config, "feedforward.expert.limit")


def expert_rows(block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Row, ...]:
    """Return the rows of experts that are stored one by one, under `block` in a layer."""
    theirs, ours = f"{{p}}layers.{{i}}.{block}.{{j}}", f"{OURS}.feedforward.experts.{{j}}"
    pairs = (("gate", gate), ("up", up), ("down", down))
    return tuple(row for mine, name in pairs for row in linear(f"{theirs}.{name}", f"{ours}.{mine}"))


@dataclass(frozen=True)
class Packed:
    """All experts of a layer in one tensor, whose first dimension counts them.

    `parts` matrices of each expert are concatenated, or their rows interleaved. `transposed`: matrices are (in, out).
    """

    parts: int = 1
    interleaved: bool = False
    transposed: bool = False

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        found: list[Tensor] = []
        for one in theirs:
            rows = one.t() if self.transposed and one.dim() == 2 else one
            found += [rows[i :: self.parts] for i in range(self.parts)] if self.interleaved else rows.chunk(self.parts)
        return found

    def theirs(self, ours: list[Tensor]) -> Tensor:
        experts = [ours[i : i + self.parts] for i in range(0, len(ours), self.parts)]
        join = (lambda parts: torch.stack(parts, dim=1).flatten(0, 1)) if self.interleaved else torch.cat
        joined = torch.stack([join(list(parts)) for parts in experts])
        return joined.transpose(1, 2).contiguous() if self.transposed and joined.dim() == 3 else joined

    def shape(self, ours: list[Shape]) -> Shape:
        rows, *columns = ours[0]
        shape = (len(ours) // self.parts, self.parts * rows, *columns)
        return (shape[0], shape[2], shape[1]) if self.transposed and len(shape) == 3 else shape


def packed_row(theirs: str, ours: tuple[str, ...], n_experts: int, transform: Transform) -> Row:
    """Return the row of a tensor that holds all experts of a layer. `ours` are names within an expert."""
    targets = tuple(f"{OURS}.feedforward.experts.{{j}}.{name}" for name in ours)
    return Row(f"{{p}}layers.{{i}}.{theirs}", targets, transform, every=n_experts)
