"""Entries of embeddings and heads whose width is not that of the model, and of layers that share parameters."""

from dataclasses import dataclass
from typing import Any

from glassformer.config import ModelConfig
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import Source
from glassformer.weights.keys import Values


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
class Groups:
    """Groups of layers that share parameters. Each group is a run of `inner` blocks, which all its layers repeat."""

    def read(self, source: Source, values: Values) -> None:
        layers = values["n_layers"]
        groups, inner = source.integer("num_hidden_groups", 1), source.integer("inner_group_num", 1)
        if not 1 <= groups <= layers or inner < 1:
            raise WeightsError(
                f"config.json has num_hidden_groups={groups} and inner_group_num={inner}: both must be at least 1, and "
                f"there cannot be more groups than num_hidden_layers={layers}."
            )
        if inner > 1 and groups == layers:
            raise WeightsError(
                f"config.json has inner_group_num={inner} and as many groups as layers ({layers}), so that no block is "
                "shared: write it as inner_group_num=1 with one group per block."
            )
        values["n_layers"] = layers * inner
        values["shared_blocks"] = shared_blocks(layers, groups, inner)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        layers, groups, inner = grouping(config)
        data |= {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}


def shared_blocks(layers: int, groups: int, inner: int) -> tuple[int, ...]:
    """Return the block of each layer: layer i belongs to group int(i / (layers / groups))."""
    of_layer = [int(i / (layers / groups)) for i in range(layers)]
    return tuple(group * inner + block for group in of_layer for block in range(inner))


def grouping(config: ModelConfig) -> tuple[int, int, int]:
    """Return the number of layers, of groups, and of blocks in a group that give the shared blocks of a config."""
    blocks = tuple(config.block_of_layer(layer) for layer in range(config.n_layers))
    n = len(set(blocks))
    for inner in (i for i in range(1, n + 1) if n % i == 0 and config.n_layers % i == 0):
        layers, groups = config.n_layers // inner, n // inner
        if shared_blocks(layers, groups, inner) == blocks:
            return layers, groups, inner
    raise WeightsError(f"shared_blocks={blocks} are not groups of layers as ALBERT has them: {SAVE_AS_GLASS}.")
