"""Falcon: 7B (parallel, one norm, one key/value head), 40B and 180B (groups, two norms), 11B, RW (ALiBi, pre-norm)."""

import math
from typing import Any

from glassformer.config import Alibi, ModelConfig
from glassformer.weights.convert import PerHead, Row
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Source
from glassformer.weights.hf.common import DENSE, INIT, LAYER_NORM, SAME_BIAS, classes
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import QKV, Block, names
from glassformer.weights.keys import (
    SIZES,
    Dropout,
    Tied,
    Values,
    activation,
    describe,
    eps,
    flag,
    integer,
    max_len,
    same,
)

NORMS = {
    "parallel": {"norm": "input_layernorm"},
    "parallel_two": {"norm_attention": "ln_attn", "norm_feedforward": "ln_mlp"},
    "pre": {"norm_attention": "input_layernorm", "norm_feedforward": "post_attention_layernorm"},
}


class Architecture:
    """Number of key/value heads and placement of the norms, which five keys of config.json decide together."""

    def read(self, source: Source, values: Values) -> None:
        new, parallel = source.flag("new_decoder_architecture", False), source.flag("parallel_attn", True)
        n_heads, norms = values["attention.n_heads"], source.integer("num_ln_in_parallel_attn", 2 if new else 1)
        if norms not in (1, 2) or (norms == 2 and not new):
            raise WeightsError(f"config.json has num_ln_in_parallel_attn={norms}, which must be 1, or 2 in new models.")
        groups = source.integer("num_kv_heads", n_heads) if new else 1 if source.flag("multi_query", True) else n_heads
        values["attention.n_kv_heads"] = groups
        values["placement"] = "parallel_two" if norms == 2 else "parallel" if parallel or new else "pre"

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        two, groups = config.placement == "parallel_two", config.n_kv_heads
        data["new_decoder_architecture"] = new = two or groups not in (1, config.n_heads)
        data |= {"num_ln_in_parallel_attn": 2 if two else 1 if new else None, "num_kv_heads": groups}
        data |= {"multi_query": groups == 1, "parallel_attn": config.placement != "pre"}


class Positions(Rope):
    """Rotary positions or ALiBi, which is scaled with the scores and rounded to bfloat16."""

    def read(self, source: Source, values: Values) -> None:
        super().read(source, values)
        if source.flag("alibi", False):
            width = values["d_model"] // values["attention.n_heads"]
            values["position"] = Alibi(scale=1 / math.sqrt(width), rounded=True)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        super().write(config, data)
        data["alibi"] = isinstance(config.position, Alibi)


def rows(config: ModelConfig) -> tuple[Row, ...]:
    block: Block = {
        **NORMS.get(config.placement, {}),
        QKV: ("self_attention.query_key_value", PerHead(config.n_kv_heads)),
        "attention.o": "self_attention.dense",
        **{"feedforward.up": "mlp.dense_h_to_4h", "feedforward.down": "mlp.dense_4h_to_h"},
    }
    return names(block, layers="{p}h.{i}", embed="word_embeddings", norm="ln_f")


FALCON = describe(
    "falcon",
    classes("Falcon"),
    {**LAYER_NORM, **DENSE},
    (
        *(*SIZES, INIT, max_len(2048), activation("activation", "gelu"), Architecture(), Positions()),
        integer("ffn_hidden_size", "feedforward.d_ff", lambda values: 4 * values["d_model"], null=same),
        eps(1e-5, "layer_norm_epsilon"),
        flag("bias", "attention.bias", False),
        SAME_BIAS,
        Dropout("hidden_dropout", "attention_dropout"),
        Tied("transformer.", "lm_head.weight", "word_embeddings.weight", default=True),
    ),
    rows,
    prefix="transformer.",
    embed="word_embeddings.weight",
)
FAMILIES = (FALCON,)
