"""Nemotron and Minitron (LayerNorm with weights around 0), and Persimmon (LayerNorm of queries and keys).

Both have a squared ReLU without a gate and rotate half of each head.
"""

from glassformer.config import ModelConfig
from glassformer.weights.convert import PerHead, Row
from glassformer.weights.hf.common import (
    ATTENTION_BIAS,
    DENSE,
    LAYER_NORM,
    MLP_BIAS,
    UNTIED,
    classes,
    qk_norm,
    rope,
    sizes,
)
from glassformer.weights.hf.layouts import FREQUENCIES, LLAMA, PRE_NORMS, QKV, names
from glassformer.weights.keys import (
    INIT,
    SIZES,
    WIDTH,
    Dropout,
    activation,
    describe,
    eps,
    max_len,
)

NEMOTRON = describe(
    "nemotron",
    classes("Nemotron"),
    {"norm": {"kind": "layer_norm", "offset": 1.0}, **DENSE},
    (
        *(*sizes(4096, act="relu2"), eps(1e-5, "norm_eps"), UNTIED, rope(fraction=0.5)),
        *(ATTENTION_BIAS, MLP_BIAS),
    ),
    names(LLAMA),
    drops=FREQUENCIES,
)

NAMES = {
    **PRE_NORMS,
    "attention.o": "self_attn.dense",
    **{f"attention.{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"},
    **{"feedforward.up": "mlp.dense_h_to_4h", "feedforward.down": "mlp.dense_4h_to_h"},
}


def rows(config: ModelConfig) -> tuple[Row, ...]:
    fused = {QKV: ("self_attn.query_key_value", PerHead(config.n_heads))}
    return names({**NAMES, **fused}, norm="final_layernorm")


PERSIMMON = describe(
    "persimmon",
    classes("Persimmon"),
    {**LAYER_NORM, **DENSE},
    (
        *(*SIZES, WIDTH, INIT, max_len(16384), activation("hidden_act", "relu2"), UNTIED, rope(fraction=0.5)),
        eps(1e-5, "layer_norm_eps"),
        *qk_norm("qk_layernorm", {"kind": "layer_norm"}, default=True),
        Dropout("hidden_dropout", "attention_dropout"),
    ),
    rows,
)
FAMILIES = (NEMOTRON, PERSIMMON)
