"""ALBERT: BERT with narrow embeddings that are projected to the model's width, and layers that share parameters."""

from glassformer.config import ModelConfig
from glassformer.weights.convert import Drop, Row, linear
from glassformer.weights.encoders.parts import (
    BASE,
    COMMON,
    EMBEDDINGS,
    EPS,
    IGNORED,
    HeadNames,
    MaskedHead,
    Pad,
    Pooler,
    Table,
    names,
    segments,
)
from glassformer.weights.encoders.width import Groups, Width, grouping
from glassformer.weights.keys import activation, describe

HEAD = HeadNames("predictions.dense", "predictions.LayerNorm", "predictions.decoder", "predictions.bias")
OUTSIDE = {**EMBEDDINGS, "encoder.project": "encoder.embedding_hidden_mapping_in", "pooler": "pooler"}
BLOCK = {
    **{f"attention.{x}": f"attention.{y}" for x, y in zip("qkvo", ("query", "key", "value", "dense"), strict=True)},
    **{"norm_attention": "attention.LayerNorm", "norm_feedforward": "full_layer_layer_norm"},
    **{"feedforward.up": "ffn", "feedforward.down": "ffn_output"},
}


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


ALBERT = describe(
    "albert",
    ("AlbertForMaskedLM", "AlbertModel"),
    BASE,
    (
        *(*COMMON, activation("hidden_act", "gelu_new"), EPS, Pad(0), Table()),
        segments(),
        MaskedHead("albert.", HEAD),
        Pooler("albert.", "pooler.weight"),
        Width("embedding_size", 128, always=True),
        Groups(),
    ),
    rows,
    prefix="albert.",
    embed="embeddings.word_embeddings.weight",
    drops=(
        *IGNORED,
        *(
            Drop(f"sop_classifier.classifier.{x}", "the sentence-order classifier", notice=True)
            for x in ("weight", "bias")
        ),
    ),
)
