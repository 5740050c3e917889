"""Llama and related models: pre-norm decoder, RMSNorm, rotary positions, gated feed-forward, grouped-query attention.

| member  | detected by                                    | biases           | window                                 |
|---------|------------------------------------------------|------------------|----------------------------------------|
| Llama   | none of the following                          | all four or none | none                                   |
| Mistral | `sliding_window` without `use_sliding_window`  | none             | all layers                             |
| Mixtral | experts                                        | none             | all layers                             |
| Qwen2   | biases on q, k, v but not on o                 | q, k, v          | some layers, with `use_sliding_window` |
| Qwen3   | norms of queries and keys                      | all four or none | some layers, with `use_sliding_window` |

If config.json has a `model_type`, it must agree with the detected member.
"""

import dataclasses
from typing import Any

from glassformer.config import Dense, ModelConfig, MoE
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import Family, Source
from glassformer.weights.hf.common import (
    ATTENTION_BIAS,
    GATED,
    MLP_BIAS,
    NO_BIAS,
    QK_NORM_EPS,
    RMS,
    UNTIED,
    classes,
    rope,
    sizes,
)
from glassformer.weights.hf.experts import Mixture, expert_rows
from glassformer.weights.hf.layers import Windows, all_full, from_layer
from glassformer.weights.hf.layouts import FREQUENCIES, LLAMA, names
from glassformer.weights.keys import Constant, Entry, ReadOnly, Values, describe, eps, only

EXPERTS = expert_rows("block_sparse_moe.experts", "w1", "w3", "w2")
ROWS = (*names({**LLAMA, "feedforward.router": "block_sparse_moe.gate"}), *EXPERTS)


class AttentionDropout:
    """The dropout of the attention pattern, which we do not have."""

    def read(self, source: Source, values: Values) -> None:
        if source.number("attention_dropout", 0.0):
            source.notes.append(
                "attention_dropout is ignored: it only affects training, and only the attention pattern."
            )

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["attention_dropout"] = 0.0


def llama_like(type: str, name: str, base: dict[str, Any], *entries: Entry) -> Family:
    """Return a member of the family. `entries` are those in which the members differ."""
    common = (
        *(UNTIED, AttentionDropout()),
        ReadOnly(only("pretraining_tp", 1, why="which splits matrices to imitate another machine")),
    )
    return describe(
        type,
        classes(name),
        {**RMS, **base},
        (*entries, *common),
        ROWS,
        drops=FREQUENCIES,
        keys=("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps"),
        typical_names=("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"),
    )


def without(type: str, *keys: str) -> tuple[Entry, ...]:
    """Return the entries of flags that a member does not have."""
    return tuple(ReadOnly(only(key, False, why=f"which {type} does not have")) for key in keys)


SOME_LAYERS: tuple[Entry, ...] = (
    Windows(4096, from_layer(28, "use_sliding_window"), switch="use_sliding_window"),
    Constant("max_window_layers", lambda config: next(filter(config.window, range(config.n_layers)), config.n_layers)),
)
"""Windows from layer `max_window_layers` on, or in the layers that `layer_types` lists."""
QK_NORM = {"attention": {"qk_norm": {"kind": "rms_norm"}}}
MEMBERS = {
    "llama": llama_like(
        *("llama", "Llama", GATED),
        *(*sizes(2048), eps(1e-6), rope(), ATTENTION_BIAS, MLP_BIAS),
        ReadOnly(only("sliding_window", None, why="which Llama does not have")),
        ReadOnly(Windows(None, all_full)),
    ),
    "mistral": llama_like(
        *("mistral", "Mistral", {**GATED, **NO_BIAS}),
        *(*sizes(131072, n_kv_heads=8), eps(1e-6), rope(), Windows(4096)),
        *without("mistral", "attention_bias", "mlp_bias"),
    ),
    "mixtral": llama_like(
        *("mixtral", "Mixtral", NO_BIAS),
        *(*sizes(131072, n_kv_heads=8), eps(1e-5), rope(1e6), Windows(None)),
        Mixture(("num_local_experts", 8), ("num_experts_per_tok", 2), ("intermediate_size", 14336)),
        *without("mixtral", "attention_bias", "mlp_bias"),
    ),
    "qwen2": llama_like(
        *("qwen2", "Qwen2", {**GATED, "attention": {"bias": True, "out_bias": False}}),
        *(*sizes(32768, n_kv_heads=32), eps(1e-6), rope(), *SOME_LAYERS, *without("qwen2", "mlp_bias")),
    ),
    "qwen3": llama_like(
        *("qwen3", "Qwen3", {**GATED, **QK_NORM}),
        *(*sizes(32768, n_kv_heads=32, d_head=128), eps(1e-6), QK_NORM_EPS, rope(), ATTENTION_BIAS),
        *(*SOME_LAYERS, *without("qwen3", "mlp_bias")),
    ),
}


def detect(source: Source) -> str:
    """Return the member of the family, detected from tensors and keys; without tensors `model_type` decides."""
    given = source.data.get("model_type")
    attention = f"{source.prefix('model.')}layers.0.self_attn."
    window = source.data.get("sliding_window") is not None and "use_sliding_window" not in source.data
    if source.tensors is None and given is not None:
        return given
    if source.has(attention + "q_norm.weight"):
        detected = {"qwen3"}
    elif source.has(attention + "q_proj.bias"):
        detected = {"llama"} if source.has(attention + "o_proj.bias") else {"qwen2"}
    elif "num_local_experts" in source.data:
        detected = {"mixtral"}
    else:  # Llama and Mistral without a window are identical
        detected = {"mistral"} if window else {"llama", "mistral"}
    if given is None:
        return min(detected)
    if given not in detected:
        raise WeightsError(
            f"config.json has model_type={given!r}, but its keys and tensors are those of "
            f"{' or '.join(sorted(detected))}: correct whichever is wrong."
        )
    return given


def simplest(config: ModelConfig) -> str:
    """Return the simplest member that can represent the config. `to_hf` finds what it cannot represent."""
    if isinstance(config.feedforward, Dense):
        raise WeightsError(
            f"feedforward=Dense cannot be written as Llama, whose feed-forwards are gated: {SAVE_AS_GLASS}."
        )
    if config.attention.qk_norm is not None:
        return "qwen3"
    if isinstance(config.feedforward, MoE):
        return "mixtral"
    if config.attention.bias:
        return "llama" if config.out_bias else "qwen2"
    # Llama requires D to be a multiple of H, Mistral does not.
    return "llama" if config.attention.window is None and config.d_model % config.n_heads == 0 else "mistral"


FAMILY = dataclasses.replace(
    MEMBERS["llama"],
    name="Llama",
    types=tuple(MEMBERS),
    read=lambda source: MEMBERS[detect(source)].read(source),
    write=lambda config: MEMBERS[simplest(config)].write(config),
)
FAMILIES = (FAMILY,)
