"""Gemma 1 to 3 and VaultGemma: norms with weights around 0, gated tanh GELU, embeddings times sqrt(D), tied head.

Gemma 2 adds a norm after every branch, soft caps and alternating windows. Gemma 3 drops the caps, normalizes queries
and keys, and rotates with another base in layers with a window.
"""

import math
from typing import Any

from glassformer.weights.hf.common import QK_NORM_EPS
from glassformer.weights.hf.layers import Rope, RopeByType, Windows, every
from glassformer.weights.hf.layouts import ATTENTION, FREQUENCIES, GATED, LLAMA, QK_NORMS, names
from glassformer.weights.keys import (
    INIT,
    SIZES,
    WIDTH,
    Derived,
    Tied,
    activation,
    describe,
    eps,
    flag,
    groups,
    head_dim,
    max_len,
    number,
    only,
    whole,
)

BASE: dict[str, Any] = {
    "norm": {"kind": "rms_norm", "offset": 1.0},
    "feedforward": {"kind": "gated"},
}
SANDWICH = {
    "norm_attention": "input_layernorm",
    "norm_attention_out": "post_attention_layernorm",
    "norm_feedforward": "pre_feedforward_layernorm",
    "norm_feedforward_out": "post_feedforward_layernorm",
}
PRE = {"norm_attention": "input_layernorm", "norm_feedforward": "pre_feedforward_layernorm"}
COMMON = (
    *SIZES,
    WIDTH,
    INIT,
    head_dim(256),
    eps(1e-6),
    flag("attention_bias", "attention.bias", False),
    Derived("embedding.scale", lambda values: math.sqrt(values["d_model"])),
    Tied("model.", "lm_head.weight", "embed_tokens.weight", default=True),
    only("use_bidirectional_attention", False, why="attention to later tokens"),
)
SCALE = number(
    *("query_pre_attn_scalar", "attention.scale", 256),
    decode=lambda given: given**-0.5,
    encode=lambda scale: whole(scale**-2),
    get=lambda config: config.scale,
)
CAP = number("final_logit_softcapping", "head.softcap", 30.0)

GEMMA = describe(
    "gemma",
    ("GemmaForCausalLM", "GemmaModel"),
    BASE,
    # transformers computes the tanh approximation for "gelu" as well
    (*COMMON, groups(16), max_len(8192), activation("hidden_act", "gelu_pytorch_tanh", gelu="gelu_tanh"), Rope()),
    names(LLAMA),
    drops=FREQUENCIES,
)
GEMMA2 = describe(
    "gemma2",
    ("Gemma2ForCausalLM", "Gemma2Model"),
    {**BASE, "placement": "sandwich"},
    (
        *(*COMMON, groups(4), max_len(8192), activation("hidden_activation", "gelu_pytorch_tanh"), SCALE),
        *(CAP, number("attn_logit_softcapping", "attention.softcap", 50.0), Windows(4096, every(2)), Rope()),
    ),
    names({**SANDWICH, **ATTENTION, **GATED}),
    drops=FREQUENCIES,
)
GEMMA3 = describe(
    "gemma3_text",
    ("Gemma3ForCausalLM", "Gemma3TextModel"),
    {**BASE, "placement": "sandwich", "attention": {"qk_norm": {"kind": "rms_norm", "offset": 1.0}}},
    (
        *(*COMMON, groups(4), max_len(131072), activation("hidden_activation", "gelu_pytorch_tanh"), SCALE),
        QK_NORM_EPS,
        number("final_logit_softcapping", "head.softcap", None),
        Windows(4096, every(6, "sliding_window_pattern")),
        RopeByType(full=1e6, sliding=1e4, sliding_key="rope_local_base_freq"),
    ),
    names({**SANDWICH, **ATTENTION, **QK_NORMS, **GATED}),
    drops=FREQUENCIES,
)
VAULT_GEMMA = describe(
    "vaultgemma",
    ("VaultGemmaForCausalLM", "VaultGemmaModel"),
    BASE,
    (
        *(*COMMON, groups(4), max_len(8192), activation("hidden_activation", "gelu_pytorch_tanh"), SCALE),
        *(CAP, number("attn_logit_softcapping", "attention.softcap", 50.0), Windows(4096, every(2)), Rope()),
    ),
    names({**PRE, **ATTENTION, **GATED}),
)
FAMILIES = (GEMMA, GEMMA2, GEMMA3, VAULT_GEMMA)
