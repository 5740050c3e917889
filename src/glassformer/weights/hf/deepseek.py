"""DeepSeek-V2 and V3 (and Kimi-K2, Moonlight): latent attention, experts in groups, a shared expert.

dots.llm1, GLM-4.5 and Solar Open have the experts of DeepSeek-V3 and ordinary attention; Youtu has its attention only.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from glassformer.config import Latent, ModelConfig, Rotary, Router, YarnScaling
from glassformer.weights.convert import CONCATENATED, Drop, Row, Shape, Transform
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Source
from glassformer.weights.hf.common import (
    ATTENTION_BIAS,
    INIT,
    QK_NORM_EPS,
    RMS,
    TIED,
    UNTIED,
    classes,
    qk_norm,
    rope,
    sizes,
)
from glassformer.weights.hf.experts import EVERYWHERE, Mixture, TwoWay, after_first, expert_rows, shared_times
from glassformer.weights.hf.layers import Windows, from_layer
from glassformer.weights.hf.layouts import GATED as GATED_NAMES
from glassformer.weights.hf.layouts import LLAMA, OURS, PRE_NORMS, Block, names
from glassformer.weights.keys import SIZES, WIDTH, Values, activation, describe, eps, flag, max_len, only
from glassformer.weights.rope import read_rope, write_rope


@dataclass(frozen=True)
class RotatedLast(Transform):
    """Queries by heads: theirs have the rotated components last, ours first."""

    heads: int
    rotated: int

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        return [self._rolled(theirs, self.rotated)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        return self._rolled(ours[0], -self.rotated)

    def _rolled(self, rows: Tensor, by: int) -> Tensor:
        return rows.view(self.heads, -1, *rows.shape[1:]).roll(by, dims=1).reshape(rows.shape)


@dataclass(frozen=True)
class KeysAndValues(Transform):
    """By heads: the own components of the key, then the value."""

    heads: int

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        widths = [shape[0] // self.heads for shape in shapes]
        parts = theirs.view(self.heads, -1, *theirs.shape[1:]).split(widths, dim=1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        parts = [part.view(self.heads, -1, *part.shape[1:]) for part in ours]
        return torch.cat(parts, dim=1).flatten(0, 1)


@dataclass(frozen=True)
class LatentKeys:
    """The widths of latent attention, its rotary positions, and the factor on the scores that YaRN changes."""

    interleaved: bool | None = None
    """Whether rotated pairs are neighbours; None: `rope_interleave` decides."""

    def read(self, source: Source, values: Values) -> None:
        own, rotated = source.integer("qk_nope_head_dim", 128), source.integer("qk_rope_head_dim", 64)
        width = own + rotated
        pairs = source.flag("rope_interleave", True) if self.interleaved is None else self.interleaved
        rope = read_rope(source, values.get("max_len"), pairing="interleaved" if pairs else "halves")
        q_rank = source.integer("q_lora_rank", None if "q_lora_rank" in source.data else 1536)
        values["attention.latent"] = Latent(source.integer("kv_lora_rank", 512), rotated, q_rank)
        values["attention.d_head"], values["attention.d_value"] = width, source.integer("v_head_dim", 128)
        values["position"] = Rotary(rope.base, rope.pairing, rotated / width, rope.scaling)
        table = source.data.get("rope_scaling") or source.data.get("rope_parameters") or {}
        if isinstance(rope.scaling, YarnScaling) and (weight := table.get("mscale_all_dim")):
            values["attention.scale"] = width**-0.5 * (0.1 * weight * math.log(rope.scaling.factor) + 1) ** 2

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        latent, position = config.attention.latent, config.position
        if latent is None or not isinstance(position, Rotary):
            return
        data |= {"q_lora_rank": latent.q_rank, "kv_lora_rank": latent.kv_rank, "qk_rope_head_dim": latent.d_shared}
        data |= {"qk_nope_head_dim": config.d_head - latent.d_shared, "v_head_dim": config.d_value}
        data |= {"head_dim": latent.d_shared, "num_key_value_heads": config.n_heads}
        data |= write_rope(Rotary(position.base, position.pairing, 1.0, position.scaling), latent.d_shared)
        if self.interleaved is None:
            data["rope_interleave"] = position.pairing == "interleaved"
        if isinstance(position.scaling, YarnScaling) and position.scaling.factor > 1:
            growth = math.sqrt(config.scale * math.sqrt(config.d_head)) - 1
            weight = growth / (0.1 * math.log(position.scaling.factor))
            data["rope_parameters"]["mscale_all_dim"] = data["rope_scaling"]["mscale_all_dim"] = weight


MOE_NAMES: Block = {
    "feedforward.router": "mlp.gate",
    **{f"feedforward.shared.{x}": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
    **GATED_NAMES,
}
CORRECTION = Row("{p}layers.{i}.mlp.gate.e_score_correction_bias", (f"{OURS}.feedforward.router.correction",))
EXPERTS = expert_rows("mlp.experts")
LATER_LAYERS = (Drop("{p}layers.{i}.{rest}", "a layer that predicts several tokens at once", notice=True, beyond=True),)


def latent_block(config: ModelConfig) -> Block:
    """Return the names of latent attention and of the norms of a block."""
    rotated = config.attention.latent.d_shared if config.attention.latent else 0
    low = config.attention.latent is not None and config.attention.latent.q_rank is not None
    return {
        **PRE_NORMS,
        "attention.q": ("self_attn.q_b_proj" if low else "self_attn.q_proj", RotatedLast(config.n_heads, rotated)),
        **{"attention.q_down": "self_attn.q_a_proj", "attention.q_down_norm": "self_attn.q_a_layernorm"},
        "attention.kv_down attention.k_shared": ("self_attn.kv_a_proj_with_mqa", CONCATENATED),
        "attention.kv_down_norm": "self_attn.kv_a_layernorm",
        "attention.k attention.v": ("self_attn.kv_b_proj", KeysAndValues(config.n_heads)),
        "attention.o": "self_attn.o_proj",
    }


def rows(config: ModelConfig) -> tuple[Row, ...]:
    return (*names({**latent_block(config), **MOE_NAMES}), *EXPERTS, CORRECTION)


def sigmoid_router(groups: int, top_groups: int, scale: float) -> TwoWay:
    """Return the router of DeepSeek-V3; the arguments are defaults."""

    def read(source: Source) -> dict[str, Any]:
        return {
            **{"score": "sigmoid", "correction": True, "scale": source.number("routed_scaling_factor", scale)},
            **{"groups": source.integer("n_group", groups), "top_groups": source.integer("topk_group", top_groups)},
        }

    return TwoWay(read, written_router)


def written_router(router: Router) -> dict[str, Any]:
    return {"routed_scaling_factor": router.scale, "n_group": router.groups, "topk_group": router.top_groups}


def softmax_router(source: Source) -> dict[str, Any]:
    """The router of DeepSeek-V2."""
    source.only("topk_method", "greedy", "group_limited_greedy", why="another choice of experts")
    grouped = source.data.get("topk_method") == "group_limited_greedy"
    return {
        **{"scale": source.number("routed_scaling_factor", 1.0), "group_score": "max"},
        "groups": source.integer("n_group", 1) if grouped else 1,
        "top_groups": source.integer("topk_group", 1) if grouped else 1,
    }


def written_softmax_router(router: Router) -> dict[str, Any]:
    return written_router(router) | {"topk_method": "group_limited_greedy" if router.groups > 1 else "greedy"}


def by_layer_types(source: Source, values: Values) -> list[bool]:
    """Experts in the layers that `mlp_layer_types` calls sparse. Default: all but the first."""
    n = values["n_layers"]
    types = source.data.get("mlp_layer_types") or ["dense"] + ["sparse"] * (n - 1)
    if not isinstance(types, list) or len(types) != n or set(types) - {"dense", "sparse"}:
        raise WeightsError(f"config.json has mlp_layer_types={types!r}, which must say dense or sparse of {n} layers.")
    return [kind == "sparse" for kind in types]


def layer_types(sparse: list[bool]) -> dict[str, Any]:
    return {"mlp_layer_types": ["sparse" if one else "dense" for one in sparse]}


COMMON = (
    *SIZES,
    INIT,
    activation("hidden_act", "silu"),
    eps(1e-6),
    UNTIED,
    flag("attention_bias", "attention.bias", False),
)
ROWS = (*names({**LLAMA, **MOE_NAMES}), *EXPERTS, CORRECTION)
"""The names of families with the experts of DeepSeek and ordinary attention."""


def experts(
    count: int, active: int, width: int, shared: int = 1, sparse: TwoWay = EVERYWHERE, **options: Any
) -> Mixture:
    """Return the entry of DeepSeek's experts; the numbers are the defaults of its keys."""
    usual = {"normalize": ("norm_topk_prob", True), "router": sigmoid_router(1, 1, 1.0)}
    return Mixture(
        *(("n_routed_experts", count), ("num_experts_per_tok", active), ("moe_intermediate_size", width)),
        aliases=("num_local_experts",),
        shared=shared_times("n_shared_experts", shared),
        sparse=sparse,
        **{**usual, **options},
    )


DEEPSEEK_V3 = describe(
    "deepseek_v3",
    classes("DeepseekV3"),
    RMS,
    (
        *(*COMMON, max_len(4096), LatentKeys()),
        only("moe_layer_freq", 1, why="experts in some layers only"),
        only("topk_method", "noaux_tc", why="another choice of experts"),
        only("scoring_func", "sigmoid", why="another score of experts"),
        experts(256, 8, 2048, sparse=after_first("first_k_dense_replace", 3), router=sigmoid_router(8, 4, 2.5)),
    ),
    rows,
    drops=LATER_LAYERS,
    aliases=("kimi_k2",),
)
DEEPSEEK_V2 = describe(
    "deepseek_v2",
    classes("DeepseekV2"),
    RMS,
    (
        *(*COMMON, max_len(2048), LatentKeys(interleaved=True), flag("mlp_bias", "feedforward.bias", False)),
        only("moe_layer_freq", 1, why="experts in some layers only"),
        only("scoring_func", "softmax", why="another score of experts"),
        experts(
            *(64, 6, 1407),
            shared=2,
            sparse=after_first("first_k_dense_replace", 0),
            normalize=("", False),  # transformers never normalizes, whatever norm_topk_prob says
            router=TwoWay(softmax_router, written_softmax_router),
        ),
    ),
    rows,
)
DOTS1 = describe(
    "dots1",
    classes("Dots1"),
    {**RMS, "attention": {"qk_norm": {"kind": "rms_norm"}}},
    (
        *(*sizes(2048, n_kv_heads=32), eps(1e-6), QK_NORM_EPS, ATTENTION_BIAS, UNTIED, rope()),
        Windows(4096, from_layer(62)),
        experts(256, 8, 2048, sparse=after_first("first_k_dense_replace", 0), normalize=("norm_topk_prob", False)),
    ),
    ROWS,
)
GLM4_MOE = describe(
    "glm4_moe",
    classes("Glm4Moe"),
    {**RMS, "attention": {"out_bias": False}},
    (
        *(*sizes(131072, n_kv_heads=8), eps(1e-5), ATTENTION_BIAS, UNTIED, rope(fraction=0.5)),
        *qk_norm("use_qk_norm", {"kind": "rms_norm"}),
        experts(128, 8, 1408, sparse=after_first("first_k_dense_replace", 1)),
    ),
    ROWS,
    drops=LATER_LAYERS,
)
GLM4_MOE_LITE = describe(
    "glm4_moe_lite",
    classes("Glm4MoeLite"),
    RMS,
    (
        *(*COMMON, max_len(202752), LatentKeys()),
        experts(64, 4, 1536, sparse=TwoWay(by_layer_types, layer_types), router=sigmoid_router(1, 1, 1.8)),
    ),
    rows,
    drops=LATER_LAYERS,
)
SOLAR_OPEN = describe(
    "solar_open",
    classes("SolarOpen"),
    {**RMS, "attention": {"out_bias": False}},
    (
        *(*(entry for entry in sizes(131072, n_kv_heads=8, d_head=128) if entry is not WIDTH), eps(1e-5)),
        *(ATTENTION_BIAS, UNTIED, rope(1e6)),
        experts(128, 8, 1280),
    ),
    ROWS,
    drops=LATER_LAYERS,
)
YOUTU = describe(
    "youtu",
    classes("Youtu"),
    {**RMS, "feedforward": {"kind": "gated"}},
    (*(entry for entry in COMMON if entry is not UNTIED), TIED, WIDTH, max_len(131072), LatentKeys()),
    lambda config: names({**latent_block(config), **GATED_NAMES}),
)
FAMILIES = (DEEPSEEK_V3, DEEPSEEK_V2, DOTS1, GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN, YOUTU)
