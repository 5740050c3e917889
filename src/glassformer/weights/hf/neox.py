"""GPT-NeoX and Pythia: parallel branches with two norms, a quarter of each head rotated."""

from glassformer.config import ModelConfig
from glassformer.weights.convert import Drop, PerHead, Row
from glassformer.weights.hf.common import DENSE, INIT, LAYER_NORM, classes
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import QKV, names
from glassformer.weights.keys import (
    SIZES,
    WIDTH,
    Dropout,
    Tied,
    activation,
    describe,
    eps,
    flag,
    max_len,
)

NEOX_NAMES = {
    "norm_attention": "input_layernorm",
    "norm_feedforward": "post_attention_layernorm",
    "attention.o": "attention.dense",
    "feedforward.up": "mlp.dense_h_to_4h",
    "feedforward.down": "mlp.dense_4h_to_h",
}
MASKS = tuple(
    Drop(f"{{p}}layers.{{i}}.attention.{name}", "masks and frequencies, stored by old versions")
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
)


def neox_rows(config: ModelConfig) -> tuple[Row, ...]:
    fused = {QKV: ("attention.query_key_value", PerHead(config.n_heads))}
    return names({**NEOX_NAMES, **fused}, embed="embed_in", norm="final_layer_norm", head="embed_out")


NEOX = describe(
    "gpt_neox",
    classes("GPTNeoX"),
    {**LAYER_NORM, **DENSE},
    (
        *(*SIZES, WIDTH, INIT, max_len(2048), activation("hidden_act", "gelu")),
        eps(1e-5, "layer_norm_eps"),
        flag("use_parallel_residual", "placement", True, "parallel_two", "pre"),
        flag("attention_bias", "attention.bias", True),
        Rope(fraction=0.25, old={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}),
        Tied("gpt_neox.", "embed_out.weight", "embed_in.weight", default=False),
        Dropout("hidden_dropout", "attention_dropout"),
    ),
    neox_rows,
    prefix="gpt_neox.",
    embed="embed_in.weight",
    drops=MASKS,
)
FAMILIES = (NEOX,)
