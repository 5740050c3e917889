"""MiniMax-M2, ERNIE 4.5 with experts, and Hunyuan, dense and with experts."""

from typing import Any

from glassformer.config import NTKScaling, Rotary
from glassformer.weights.convert import OneRow, Row
from glassformer.weights.family import Source
from glassformer.weights.hf.common import (
    ATTENTION_BIAS,
    GATED,
    QK_NORM_EPS,
    RMS,
    SAME_BIAS,
    TIED,
    UNTIED,
    classes,
    rope,
    sizes,
)
from glassformer.weights.hf.experts import Mixture, TwoWay, expert_rows, fixed, shared_times
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import ATTENTION, OURS, PRE_NORMS, QK_NORMS, names
from glassformer.weights.hf.layouts import GATED as GATED_NAMES
from glassformer.weights.keys import Derived, Values, describe, eps, flag

SHARED = ("gate", "up", "down")


class RotaryDim(Rope):
    """Rotary positions whose rotated width is `rotary_dim`."""

    def read(self, source: Source, values: Values) -> None:
        super().read(source, values)
        if "rotary_dim" in source.data and "rope_parameters" not in source.data:
            given: Rotary = values["position"]
            fraction = source.integer("rotary_dim") / values["attention.d_head"]
            values["position"] = Rotary(given.base, given.pairing, fraction, given.scaling)


CORRECTION = (f"{OURS}.feedforward.router.correction",)
MINIMAX = describe(
    "minimax_m2",
    classes("MiniMaxM2"),
    {**RMS, "attention": {"bias": False, "qk_norm": {"kind": "rms_norm"}, "qk_norm_over": "all"}},
    (
        *(*sizes(196608, n_kv_heads=8, d_head=128), eps(1e-6), QK_NORM_EPS, UNTIED, RotaryDim(5e6, fraction=1.0)),
        Mixture(
            *(("num_local_experts", 256), ("num_experts_per_tok", 8), ("intermediate_size", 1536)),
            router=fixed(score="sigmoid", correction=True),
        ),
    ),
    (
        *names({**PRE_NORMS, **ATTENTION, **QK_NORMS, "feedforward.router": "block_sparse_moe.gate"}),
        *expert_rows("block_sparse_moe.experts", "w1", "w3", "w2"),
        Row("{p}layers.{i}.block_sparse_moe.e_score_correction_bias", CORRECTION),
    ),
)


def by_interval(source: Source, values: Values) -> list[bool]:
    first, step = source.integer("moe_layer_start_index", 1), source.integer("moe_layer_interval", 1)
    n, last = values["n_layers"], source.integer("moe_layer_end_index", -1)
    return [(i + 1) % max(step, 1) == 0 and first <= i <= (last if last >= 0 else n - 1) for i in range(n)]


def interval(sparse: list[bool]) -> dict[str, Any]:
    first, n = (sparse.index(True) if True in sparse else len(sparse)), len(sparse)
    last = n - 1 - sparse[::-1].index(True) if True in sparse else n - 1
    return {"moe_layer_start_index": first, "moe_layer_end_index": last, "moe_layer_interval": 1}


ERNIE_MOE = describe(
    "ernie4_5_moe",
    classes("Ernie4_5_Moe"),
    RMS,
    (
        *(*sizes(131072, n_kv_heads=4), eps(1e-5), TIED, rope(500000.0, pairing="interleaved")),
        flag("use_bias", "attention.bias", False),
        SAME_BIAS,
        Derived("head.bias", lambda values: values["attention.bias"]),
        Mixture(
            *(("moe_num_experts", 64), ("moe_k", 6), ("moe_intermediate_size", 1536)),
            router=fixed(correction=True),
            shared=shared_times("moe_num_shared_experts", 2),
            sparse=TwoWay(by_interval, interval),
            expert_bias=False,
        ),
    ),
    (
        *names(
            {
                **{**PRE_NORMS, **ATTENTION, **GATED_NAMES, "feedforward.router": "mlp.gate"},
                **{f"feedforward.shared.{x}": f"mlp.shared_experts.{x}_proj" for x in SHARED},
            }
        ),
        *expert_rows("mlp.experts"),
        Row("{p}layers.{i}.mlp.moe_statics.e_score_correction_bias", CORRECTION, OneRow()),
    ),
)


class AlphaRope(Rope):
    """Rotary positions with a base that `alpha` enlarges for good, although config.json calls it dynamic."""

    def read(self, source: Source, values: Values) -> None:
        table = source.data.get("rope_scaling") or source.data.get("rope_parameters") or {}
        alpha = table.get("alpha") if isinstance(table, dict) else None
        if alpha and table.get("rope_type", table.get("type")) == "dynamic":
            base = float(table.get("rope_theta", source.number("rope_theta", self.theta)))
            values["position"] = Rotary(base, scaling=NTKScaling(float(alpha)))
        else:
            super().read(source, values)


HUNYUAN_NAMES = {
    **{**PRE_NORMS, **ATTENTION, **GATED_NAMES},
    **{"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"},
}
HUNYUAN_BASE = {**RMS, "attention": {"qk_norm": {"kind": "rms_norm"}, "qk_norm_after_rotation": True}}
HUNYUAN_KEYS = (*sizes(2048), ATTENTION_BIAS, eps(1e-5), QK_NORM_EPS, UNTIED, AlphaRope())
HUNYUAN = describe(
    "hunyuan_v1_dense",
    classes("HunYuanDenseV1"),
    {**HUNYUAN_BASE, **GATED},
    HUNYUAN_KEYS,
    names(HUNYUAN_NAMES),
)


SAME_WIDTH = TwoWay(lambda source, width: width, lambda shared, width: {})
HUNYUAN_MOE = describe(
    "hunyuan_v1_moe",
    classes("HunYuanMoEV1"),
    HUNYUAN_BASE,
    (
        *HUNYUAN_KEYS,
        Mixture(*(("num_experts", 1), ("moe_topk", 1), ("intermediate_size", 11008)), shared=SAME_WIDTH),
    ),
    (
        *names(
            {
                **HUNYUAN_NAMES,
                "feedforward.router": "mlp.gate.wg",
                **{f"feedforward.shared.{x}": f"mlp.shared_mlp.{x}_proj" for x in SHARED},
            }
        ),
        *expert_rows("mlp.experts"),
    ),
)
FAMILIES = (MINIMAX, ERNIE_MOE, HUNYUAN, HUNYUAN_MOE)
