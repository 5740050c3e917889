"""Phi-1, 1.5 and 2 (parallel branches, biases everywhere), and Phi-3, 3.5 and 4 (Llama with fused matrices)."""

from glassformer.weights.convert import CONCATENATED
from glassformer.weights.hf.common import DENSE, GATED, LAYER_NORM, NO_BIAS, RMS, UNTIED, classes, qk_norm, rope, sizes
from glassformer.weights.hf.layers import Windows
from glassformer.weights.hf.layouts import FREQUENCIES, FUSED_GATE, PRE_NORMS, QKV, names
from glassformer.weights.keys import Dropout, describe, eps

PHI_NAMES = {
    "norm": "input_layernorm",
    **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{f"attention.{x}_norm": f"self_attn.{x}_layernorm" for x in "qk"},
    "attention.o": "self_attn.dense",
    "feedforward.up": "mlp.fc1",
    "feedforward.down": "mlp.fc2",
}
PHI = describe(
    "phi",
    classes("Phi"),
    {**LAYER_NORM, **DENSE, "placement": "parallel", "head": {"bias": True}},
    (
        *(*sizes(2048, act="gelu_new"), eps(1e-5, "layer_norm_eps"), UNTIED, rope(fraction=0.5)),
        *qk_norm("qk_layernorm", {"kind": "layer_norm"}),
        Dropout("resid_pdrop", "embd_pdrop", "attention_dropout"),
    ),
    names(PHI_NAMES, norm="final_layernorm"),
    drops=FREQUENCIES,
)
PHI3 = describe(
    "phi3",
    classes("Phi3"),
    {**RMS, **GATED, **NO_BIAS},
    (
        *(*sizes(4096), eps(1e-5), UNTIED, Windows(None), rope(fraction=1.0)),
        Dropout("resid_pdrop", "embd_pdrop", "attention_dropout"),
    ),
    names(
        {
            **PRE_NORMS,
            QKV: ("self_attn.qkv_proj", CONCATENATED),
            "attention.o": "self_attn.o_proj",
            **FUSED_GATE,
        }
    ),
    drops=FREQUENCIES,
)
FAMILIES = (PHI, PHI3)
