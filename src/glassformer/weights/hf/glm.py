"""GLM-4: half of each head rotated, interleaved; biases on q, k and v; gate and up in one matrix.

glm4 (GLM-4-0414, GLM-Z1) has a norm after every branch as well; glm (GLM-4-9B) does not.
"""

from glassformer.weights.hf.common import GATED, RMS, UNTIED, classes, eps, rope, sizes
from glassformer.weights.hf.layouts import ATTENTION, FREQUENCIES, FUSED_GATE, PRE_NORMS, names
from glassformer.weights.keys import describe, flag

KEYS = (
    *(*sizes(131072, n_kv_heads=2, d_head=128), eps(1.5625e-7), UNTIED, rope(fraction=0.5, pairing="interleaved")),
    flag("attention_bias", "attention.bias", True),
)
BASE = {**RMS, **GATED, "attention": {"out_bias": False}}
SANDWICH = {
    "norm_attention": "input_layernorm",
    "norm_attention_out": "post_self_attn_layernorm",
    "norm_feedforward": "post_attention_layernorm",
    "norm_feedforward_out": "post_mlp_layernorm",
}
GLM = describe("glm", classes("Glm"), BASE, KEYS, names({**PRE_NORMS, **ATTENTION, **FUSED_GATE}), drops=FREQUENCIES)
GLM4 = describe(
    "glm4",
    classes("Glm4"),
    {**BASE, "placement": "sandwich"},
    KEYS,
    names({**SANDWICH, **ATTENTION, **FUSED_GATE}),
    drops=FREQUENCIES,
)
FAMILIES = (GLM, GLM4)
