"""Qwen2-MoE (a shared expert with a gate), Qwen3-MoE, OLMoE and FlexOLMo: experts stored one by one."""

from typing import Any

from glassformer.weights.family import Source
from glassformer.weights.hf.common import ATTENTION_BIAS, QK_NORM_EPS, RMS, UNTIED, classes, rope, sizes
from glassformer.weights.hf.experts import Mixture, TwoWay, expert_rows, shared_width
from glassformer.weights.hf.layers import FULL, SLIDING, Windows
from glassformer.weights.hf.layouts import ATTENTION, LLAMA, QK_NORMS, names
from glassformer.weights.hf.layouts import GATED as GATED_NAMES
from glassformer.weights.hf.olmo import AFTER, QK_NORM
from glassformer.weights.keys import Values, describe, eps, flag, number

ROUTER = {"feedforward.router": "mlp.gate"}
EXPERTS = expert_rows("mlp.experts")
SHARED = {f"feedforward.shared.{x}": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")}
SHARED |= {"feedforward.shared_gate": "mlp.shared_expert_gate"}
PRE = {name: theirs for name, theirs in LLAMA.items() if name.startswith("norm_")}
QWEN = {**PRE, **ATTENTION, **QK_NORMS, **GATED_NAMES, **ROUTER}


def by_step(source: Source, values: Values) -> list[bool]:
    """Experts in every `decoder_sparse_step`-th layer, except in those that `mlp_only_layers` lists."""
    step, dense = source.integer("decoder_sparse_step", 1), source.data.get("mlp_only_layers") or []
    return [(i + 1) % max(step, 1) == 0 and i not in dense for i in range(values["n_layers"])]


def dense_layers(sparse: list[bool]) -> dict[str, Any]:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [i for i, here in enumerate(sparse) if not here]}


BY_STEP = TwoWay(by_step, dense_layers)


def by_depth(n: int, source: Source) -> list[str]:
    """Windows in even layers below `max_window_layers`."""
    limit = source.integer("max_window_layers", 28)
    return [SLIDING if i % 2 == 0 and i < limit else FULL for i in range(n)]


QWEN2_MOE = describe(
    "qwen2_moe",
    classes("Qwen2Moe"),
    {**RMS, "attention": {"out_bias": False}},
    (
        *(*sizes(32768, n_kv_heads=16), eps(1e-6), UNTIED, rope(), flag("qkv_bias", "attention.bias", True)),
        Windows(4096, by_depth, switch="use_sliding_window", may_be_null=True),
        Mixture(
            *(("num_experts", 60), ("num_experts_per_tok", 4), ("moe_intermediate_size", 1408)),
            normalize=("norm_topk_prob", False),
            shared=shared_width("shared_expert_intermediate_size", 5632),
            shared_gate=True,
            sparse=BY_STEP,
        ),
    ),
    (*names({**QWEN, **SHARED}), *EXPERTS),
)
QWEN3_MOE = describe(
    "qwen3_moe",
    classes("Qwen3Moe"),
    {**RMS, "attention": {"qk_norm": {"kind": "rms_norm"}}},
    (
        *(*sizes(32768, n_kv_heads=4), eps(1e-6), QK_NORM_EPS, ATTENTION_BIAS, UNTIED, rope()),
        Windows(4096, switch="use_sliding_window"),
        Mixture(
            *(("num_experts", 128), ("num_experts_per_tok", 8), ("moe_intermediate_size", 768)),
            aliases=("num_local_experts",),
            normalize=("norm_topk_prob", False),
            sparse=BY_STEP,
        ),
    ),
    (*names(QWEN), *EXPERTS),
)
OLMOE = describe(
    "olmoe",
    classes("Olmoe"),
    {**RMS, **QK_NORM},
    (
        *(*sizes(4096), eps(1e-5), QK_NORM_EPS, ATTENTION_BIAS, UNTIED, rope()),
        number("clip_qkv", "attention.clip", None),
        Mixture(
            *(("num_experts", 64), ("num_experts_per_tok", 8), ("intermediate_size", 2048)),
            normalize=("norm_topk_prob", False),
        ),
    ),
    (*names({**PRE, **ATTENTION, **QK_NORMS, **ROUTER}), *EXPERTS),
)
FLEX_OLMO = describe(
    "flex_olmo",
    classes("FlexOlmo"),
    {**RMS, **QK_NORM, "placement": "after"},
    (
        *(*sizes(4096), eps(1e-6), QK_NORM_EPS, ATTENTION_BIAS, UNTIED, rope(500000.0)),
        Mixture(
            *(("num_experts", 7), ("num_experts_per_tok", 5), ("intermediate_size", 11008)),
            normalize=("norm_topk_prob", False),
        ),
    ),
    (*names({name: theirs for name, theirs in AFTER.items() if name not in GATED_NAMES} | ROUTER), *EXPERTS),
)
FAMILIES = (QWEN2_MOE, QWEN3_MOE, OLMOE, FLEX_OLMO)
