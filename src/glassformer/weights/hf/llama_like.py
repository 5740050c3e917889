"""Relatives of Llama that differ in one or two settings.

Arcee, Jais 2, Helium, ERNIE 4.5, Seed-OSS, CWM and Ministral differ in norm, biases, activation or windows. In SmolLM3
every fourth layer does not rotate queries and keys. StarCoder 2 has LayerNorm and a feed-forward without a gate. GLM-4
rotates half of each head, interleaved; it has biases on q, k and v, and gate and up in one matrix. glm4 (GLM-4-0414,
GLM-Z1) also has a norm after every branch, glm (GLM-4-9B) does not.
"""

from typing import Any

from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Source
from glassformer.weights.hf.common import (
    ATTENTION_BIAS,
    DENSE,
    GATED,
    LAYER_NORM,
    MLP_BIAS,
    NO_BIAS,
    RMS,
    SAME_BIAS,
    TIED,
    UNTIED,
    classes,
    rope,
    sizes,
)
from glassformer.weights.hf.layers import FULL, SLIDING, RotatedLayers, Windows, all_full, all_sliding
from glassformer.weights.hf.layouts import ATTENTION, FREQUENCIES, FUSED_GATE, LLAMA, PRE_NORMS, names
from glassformer.weights.keys import Derived, Dropout, Values, describe, eps, flag

ARCEE = describe(
    "arcee",
    classes("Arcee"),
    {**RMS, **DENSE},
    (*sizes(4096, act="relu2"), ATTENTION_BIAS, MLP_BIAS, eps(1e-5), UNTIED, rope()),
    names(LLAMA),
)
JAIS2 = describe(
    "jais2",
    classes("Jais2"),
    {**LAYER_NORM, **DENSE},
    (
        *(*sizes(8192, act="relu2"), eps(1e-5, "layer_norm_eps"), UNTIED, rope()),
        *(flag("attention_bias", "attention.bias", True), flag("mlp_bias", "feedforward.bias", True)),
    ),
    names(LLAMA),
)
HELIUM = describe(
    "helium",
    classes("Helium"),
    {**RMS, **GATED},
    (
        *(*sizes(4096, n_kv_heads=20, d_head=128), ATTENTION_BIAS, MLP_BIAS, eps(1e-8), UNTIED),
        rope(100000.0, pairing="interleaved"),
        Derived("attention.out_bias", lambda values: False),
    ),
    names(LLAMA),
)
ERNIE = describe(
    "ernie4_5",
    classes("Ernie4_5"),
    {**RMS, **GATED},
    (
        *(*sizes(131072, n_kv_heads=2, d_head=128), eps(1e-5), TIED, rope(500000.0, pairing="interleaved")),
        flag("use_bias", "attention.bias", False),
        SAME_BIAS,
    ),
    names(LLAMA),
)
SEED = describe(
    "seed_oss",
    classes("SeedOss"),
    {**RMS, **GATED},
    (
        *(*sizes(524288, n_kv_heads=8, d_head=128), MLP_BIAS, eps(1e-6), UNTIED, rope()),
        flag("attention_bias", "attention.bias", True),
        flag("attention_out_bias", "attention.out_bias", False, get=lambda config: config.out_bias),
    ),
    names(LLAMA),
)
CWM = describe(
    "cwm",
    classes("Cwm"),
    {**RMS, **GATED, **NO_BIAS},
    (
        *(*sizes(131072, n_kv_heads=8, d_head=128), MLP_BIAS, eps(1e-5), UNTIED, rope(1e6)),
        Windows(8192, lambda n, source: [FULL if i % 4 == 0 else SLIDING for i in range(n)]),
    ),
    names(LLAMA),
)
MINISTRAL = describe(
    "ministral",
    classes("Ministral"),
    {**RMS, **GATED, **NO_BIAS},
    (*sizes(131072, n_kv_heads=8), eps(1e-6), UNTIED, rope(), Windows(4096, all_sliding)),
    names(LLAMA),
)


def rotated(source: Source, values: Values) -> list[bool]:
    n, step = values["n_layers"], source.integer("no_rope_layer_interval", 4)
    given = source.data.get("no_rope_layers")
    if given is None:
        given = [int((i + 1) % step != 0) for i in range(n)]
    if not isinstance(given, list) or len(given) != n or any(flag not in (0, 1) for flag in given):
        raise WeightsError(
            f"config.json has no_rope_layers={given!r}, which must be 1 (rotate) or 0 for each of the {n} layers."
        )
    return [bool(flag) for flag in given]


def written(layers: list[bool]) -> dict[str, Any]:
    return {"no_rope_layers": [int(rotates) for rotates in layers]}


SMOLLM3 = describe(
    "smollm3",
    classes("SmolLM3"),
    {**RMS, **GATED},
    (
        *(*sizes(32768, n_kv_heads=4), ATTENTION_BIAS, MLP_BIAS, eps(1e-6), TIED, rope(2e6)),
        Windows(None, all_full, switch="use_sliding_window", may_be_null=True),
        RotatedLayers(rotated, written),
    ),
    names(LLAMA),
)
GLM_KEYS = (
    *(*sizes(131072, n_kv_heads=2, d_head=128), eps(1.5625e-7), UNTIED, rope(fraction=0.5, pairing="interleaved")),
    flag("attention_bias", "attention.bias", True),
)
GLM_BASE = {**RMS, **GATED, "attention": {"out_bias": False}}
SANDWICH = {
    "norm_attention": "input_layernorm",
    "norm_attention_out": "post_self_attn_layernorm",
    "norm_feedforward": "post_attention_layernorm",
    "norm_feedforward_out": "post_mlp_layernorm",
}
GLM = describe(
    "glm", classes("Glm"), GLM_BASE, GLM_KEYS, names({**PRE_NORMS, **ATTENTION, **FUSED_GATE}), drops=FREQUENCIES
)
GLM4 = describe(
    "glm4",
    classes("Glm4"),
    {**GLM_BASE, "placement": "sandwich"},
    GLM_KEYS,
    names({**SANDWICH, **ATTENTION, **FUSED_GATE}),
    drops=FREQUENCIES,
)
STARCODER2 = describe(
    "starcoder2",
    classes("Starcoder2"),
    {**LAYER_NORM, **DENSE},
    (
        *(*sizes(4096, n_kv_heads=2, act="gelu_pytorch_tanh"), eps(1e-5, "norm_epsilon"), TIED),
        flag("use_bias", "attention.bias", True),
        SAME_BIAS,
        Windows(None),
        rope(),
        Dropout("residual_dropout", "embedding_dropout", "attention_dropout"),
    ),
    names({**PRE_NORMS, **ATTENTION, "feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}),
    drops=FREQUENCIES,
)
FAMILIES = (ARCEE, JAIS2, HELIUM, ERNIE, SEED, MINISTRAL, CWM, SMOLLM3, STARCODER2, GLM, GLM4)
