"""ALBERT: BERT with narrow embeddings that are projected to the model's width, and layers that share parameters."""

from typing import Any

from glassformer.config import ModelConfig
from glassformer.weights.convert import Drop, Row, linear
from glassformer.weights.encoders.parts import IGNORED, HeadNames, Width, bert_like, names
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import Source
from glassformer.weights.keys import Values

HEAD = HeadNames("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")
OUTSIDE = {"encoder.project": "encoder.embedding_hidden_mapping_in", "pooler": "pooler"}
BLOCK = {
    **{f"attention.{x}": f"attention.{y}" for x, y in zip("qkvo", ("query", "key", "value", "dense"), strict=True)},
    **{"norm_attention": "attention.LayerNorm", "norm_feedforward": "full_layer_layer_norm"},
    **{"feedforward.up": "ffn", "feedforward.down": "ffn_output"},
}


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


def rows(config: ModelConfig) -> tuple[Row, ...]:
    """Return the rows. Block I of ours is block I mod n of group I div n, with n blocks in a group."""
    _, groups, inner = grouping(config)
    blocks: list[Row] = []
    for index in range(groups * inner):
        group, block = divmod(index, inner)
        theirs = f"{{p}}encoder.albert_layer_groups.{group}.albert_layers.{block}"
        for ours, name in BLOCK.items():
            blocks += linear(f"{theirs}.{name}", f"encoder.blocks.{index}.{ours}")
    return (*names({}, HEAD, outside=OUTSIDE)(config), *blocks)


ALBERT = bert_like(
    *("albert", "Albert", "albert.", HEAD, Width("embedding_size", 128, always=True), Groups()),
    rows=rows,
    act="gelu_new",
    pooler="pooler",
    drops=(
        *IGNORED,
        Drop("sop_classifier.classifier.weight", "the sentence-order classifier", notice=True),
        Drop("sop_classifier.classifier.bias", "the sentence-order classifier", notice=True),
    ),
)
FAMILIES = (ALBERT,)
