"""Which parts of a model the fused kernels compute. Every other part is computed by the module of the engine."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from glassformer import config as c
from glassformer.kernels.cuda.graph.linear import ACTIVATION_NAMES, CHUNK, suits
from glassformer.kernels.registry import POSITION_FIELDS, Rule, any_values, remembered, unsupported_fields
from glassformer.model.attention import Attention
from glassformer.model.block import Block
from glassformer.model.layers import Dense, Gated
from glassformer.model.moe import MoE

NORM_FIELDS = "eps bias weight offset"
ALLOWED: Mapping[str, Rule] = {
    **any_values(
        "vocab_size d_model n_layers max_len dropout init_std residual_scale first_norm shared_blocks placement"
    ),
    **any_values("layer_kinds"),  # checked layer by layer
    "attention": {"Attention"},
    **any_values("attention.n_heads attention.n_kv_heads attention.d_head attention.d_value attention.scale"),
    **any_values("attention.bias attention.out_bias attention.window attention.window_layers attention.clip"),
    **any_values("attention.softcap attention.sinks attention.qk_norm_over attention.qk_norm_after_rotation"),
    "attention.qk_norm": {None, "rms_norm", "layer_norm"},
    **any_values(NORM_FIELDS, "attention.qk_norm"),
    "feedforward": {"dense", "gated", "moe", "none"},
    "feedforward.activation": ACTIVATION_NAMES,
    **any_values("feedforward.d_ff feedforward.bias feedforward.down_bias feedforward.limit feedforward.up_offset"),
    **any_values("feedforward.n_experts feedforward.n_active feedforward.normalize feedforward.shared_gate"),
    "feedforward.expert": {"dense", "gated"},
    "feedforward.expert.activation": ACTIVATION_NAMES,
    **any_values("feedforward.expert.d_ff feedforward.expert.bias feedforward.expert.down_bias"),
    **any_values("feedforward.expert.limit feedforward.expert.up_offset"),
    "norm": {"layer_norm", "rms_norm"},
    **any_values(NORM_FIELDS, "norm"),
    "position": {"none", "learned", "sinusoidal", "rotary", "alibi"},
    **POSITION_FIELDS,
    **any_values("position.scale"),
    "embedding": {"Embedding"},
    **any_values("embedding.scale"),
    "head": {"Head"},
    **any_values("head.tied head.bias head.scale head.softcap"),
    "special": {"Special"},
    **any_values("special.bos special.eos special.pad special.start"),
    **any_values("special.forced_bos special.forced_eos special.suppressed"),
}
"""The config fields that the fused kernels implement."""
PART_OF_FIELD = {
    "attention": "attention", "position": "attention", "score_bias": "attention", "feedforward": "feedforward",
    "embedding": "embedding", "head": "head",
}  # fmt: skip
"""The part that the engine computes if a field is not supported. Any other field: the whole step."""
ROUTED = ("feedforward.router", "feedforward.shared")
"""Fields of a mixture of experts that torch computes: the choice of the experts, and the shared expert."""


@remembered(1024)
def unsupported_parts(config: c.ModelConfig, layer: int) -> dict[str, str]:
    """Return the parts of a layer (or of the whole model, "model") that the kernels do not compute, with the reason."""
    flat = dataclasses.replace(
        config,
        position=config.layer_position(layer),
        feedforward=config.layer_feedforward(layer),
        layer_kinds=(),
    )
    refused: dict[str, str] = {}
    for name, reason in unsupported_fields(flat, ALLOWED):
        if not name.startswith(ROUTED):
            refused.setdefault(PART_OF_FIELD.get(name.partition(".")[0], "model"), reason)
    if not isinstance(config, c.DecoderConfig):
        refused["model"] = "only decoder-only models have fused kernels"
    elif config.d_model % CHUNK:
        refused["model"] = f"d_model={config.d_model} is not a multiple of {CHUNK}"
    widths = (config.d_head, config.d_value)
    if any(width % 8 or width > 256 for width in widths):
        refused["attention"] = f"d_head={widths[0]} and d_value={widths[1]} are not multiples of 8 up to 256"
    return refused


def attention_is_fused(config: c.ModelConfig, block: Block, layer: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels compute the attention of a layer."""
    module: Any = block.attention
    if type(module) is not Attention or "attention" in unsupported_parts(config, layer):
        return False
    return all(suits(part, dtype) for part in (module.q, module.k, module.v, module.o))


def feedforward_is_fused(config: c.ModelConfig, block: Block, layer: int, dtype: torch.dtype) -> bool:
    """Return whether the kernels compute the feed-forward of a layer; of a mixture, its experts."""
    module: Any = block.feedforward
    if module is None or "feedforward" in unsupported_parts(config, layer):
        return False
    units: list[nn.Module] = list(module.experts) if type(module) is MoE else [module]
    return all(_unit_suits(unit, dtype) for unit in units)


def _unit_suits(unit: Any, dtype: torch.dtype) -> bool:
    if type(unit) not in (Dense, Gated):
        return False
    gate = unit.gate if isinstance(unit, Gated) else unit.up
    return all(suits(part, dtype) for part in (gate, unit.up, unit.down))


def activation_number(spec: c.Dense | c.Gated) -> int:
    return ACTIVATION_NAMES.index(spec.activation)
