"""StableLM: Llama with LayerNorm, a quarter of each head rotated, and optionally one norm for both branches."""

from glassformer.config import ModelConfig
from glassformer.weights.convert import Row
from glassformer.weights.hf.common import GATED, LAYER_NORM, UNTIED, classes, qk_norm, rope, sizes
from glassformer.weights.hf.layouts import ATTENTION, FREQUENCIES, OURS, PRE_NORMS, names
from glassformer.weights.hf.layouts import GATED as GATED_NAMES
from glassformer.weights.keys import Dropout, describe, eps, flag


def rows(config: ModelConfig) -> tuple[Row, ...]:
    norms = {"norm": "input_layernorm"} if config.placement == "parallel" else PRE_NORMS
    per_head = (
        Row(
            f"{{p}}layers.{{i}}.self_attn.{x}_layernorm.norms.{{j}}.weight",
            (f"{OURS}.attention.{x}_norm.weight[{{j}}]",),
        )
        for x in "qk"
    )
    return (*names({**norms, **ATTENTION, **GATED_NAMES}), *per_head)


STABLELM = describe(
    "stablelm",
    classes("StableLm"),
    {**LAYER_NORM, **GATED, "attention": {"out_bias": False}},
    (
        *(*sizes(4096, n_kv_heads=32), eps(1e-5, "layer_norm_eps"), UNTIED, rope(fraction=0.25)),
        flag("use_qkv_bias", "attention.bias", False),
        flag("use_parallel_residual", "placement", False, "parallel", "pre"),
        *qk_norm("qk_layernorm", {"kind": "layer_norm", "bias": False}, over="heads"),
        Dropout("hidden_dropout", "attention_dropout"),
    ),
    rows,
    drops=FREQUENCIES,
)
FAMILIES = (STABLELM,)
