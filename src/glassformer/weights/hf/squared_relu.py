"""Nemotron and Minitron (LayerNorm with weights around 0), and Persimmon (LayerNorm of queries and keys).

Both have a squared ReLU without a gate and rotate half of each head.
"""

from glassformer.config import ModelConfig
from glassformer.weights.convert import PerHead, Row
from glassformer.weights.hf.common import ATTENTION_BIAS, DENSE, LAYER_NORM, MLP_BIAS, UNTIED, classes, rope, sizes
from glassformer.weights.hf.layouts import FREQUENCIES, LLAMA, PRE_NORMS, QKV, names
from glassformer.weights.keys import INIT, SIZES, WIDTH, Derived, Dropout, activation, describe, flag, max_len, number

NEMOTRON = describe(
    "nemotron",
    classes("Nemotron"),
    {"norm": {"kind": "layer_norm", "offset": 1.0}, **DENSE},
    (
        *(*sizes(4096, act="relu2"), number("norm_eps", "norm.eps", 1e-5), UNTIED, rope(fraction=0.5)),
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
        number("layer_norm_eps", "norm.eps", 1e-5),
        flag("qk_layernorm", "_qk_norm", True, get=lambda config: config.attention.qk_norm is not None),
        Derived(
            "attention.qk_norm",
            lambda values: {"kind": "layer_norm", "eps": values["norm.eps"]} if values["_qk_norm"] else None,
        ),
        Dropout("hidden_dropout", "attention_dropout"),
    ),
    rows,
)
FAMILIES = (NEMOTRON, PERSIMMON)
