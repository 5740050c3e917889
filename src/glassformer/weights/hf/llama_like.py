"""Relatives of Llama that differ in one or two settings: Arcee, Jais 2, Helium, ERNIE 4.5, Seed-OSS, CWM, Ministral."""

from glassformer.weights.hf.common import (
    ATTENTION_BIAS,
    DENSE,
    GATED,
    LAYER_NORM,
    MLP_BIAS,
    NO_BIAS,
    RMS,
    TIED,
    UNTIED,
    classes,
    eps,
    rope,
    sizes,
)
from glassformer.weights.hf.layers import FULL, SLIDING, Windows, all_sliding
from glassformer.weights.hf.layouts import LLAMA, names
from glassformer.weights.keys import Derived, describe, flag, number

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
        *(*sizes(8192, act="relu2"), number("layer_norm_eps", "norm.eps", 1e-5), UNTIED, rope()),
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
        Derived("feedforward.bias", lambda values: values["attention.bias"]),
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
FAMILIES = (ARCEE, JAIS2, HELIUM, ERNIE, SEED, MINISTRAL, CWM)
