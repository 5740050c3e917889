"""Architectures of llama.cpp with mixtures of experts and ordinary attention."""

from collections.abc import Container, Mapping
from typing import Any

from glassformer.weights.errors import WeightsError
from glassformer.weights.formats.gguf.architecture import NAMES, SHARED_NAMES, Architecture, Key, Metadata, changed
from glassformer.weights.formats.gguf.dense import GRANITE, LLAMA_KEYS, NO_BIAS, PAIRS, SILU, UNTIED, even_heads
from glassformer.weights.formats.gguf.layouts import VECTOR

EVERYWHERE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}
"""Experts in all layers."""
EXPERTS = (
    Key("expert_count", "num_experts"),
    Key("expert_used_count", "num_experts_per_tok"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
)
SHARED: dict[str, Any] = {"names": NAMES | SHARED_NAMES}
SOFTMAX, SIGMOID = 1, 2
"""The values of `expert_gating_func`."""


def needs_shared(data: Mapping[str, Any], key: str = "n_shared_experts") -> None:
    """Raise WeightsError if a model has no shared expert: llama.cpp always adds one."""
    if not data.get(key):
        raise WeightsError(
            f"{key}=0 cannot be written as GGUF: llama.cpp computes the architecture of {data['model_type']} with a "
            "shared expert only; use --to hf or --to glass."
        )


def _gated(data: Mapping[str, Any]) -> Metadata:
    needs_shared(data, "shared_expert_intermediate_size")
    return {}


QWEN2_MOE = Architecture(
    name="qwen2moe",
    types=("qwen2_moe",),
    keys=(*LLAMA_KEYS, *EXPERTS, Key("expert_shared_feed_forward_length", "shared_expert_intermediate_size")),
    names={**NAMES, **SHARED_NAMES, "ffn_gate_inp_shexp": "feedforward.shared_gate"},
    layouts=lambda config: {"ffn_gate_inp_shexp": VECTOR},
    fixed={**SILU, **EVERYWHERE, **UNTIED, "norm_topk_prob": (False,)},
    flags={"qkv_bias": "blk.0.attn_q.bias"},
    assumed=even_heads,
    derived=_gated,
)

QWEN3_MOE = Architecture(
    name="qwen3moe",
    types=("qwen3_moe",),
    keys=(*LLAMA_KEYS, *EXPERTS),
    fixed={**SILU, **NO_BIAS, **EVERYWHERE, "norm_topk_prob": (True,)},
)

OLMOE = Architecture(
    name="olmoe",
    types=("olmoe",),
    keys=(*LLAMA_KEYS, *EXPERTS[:2]),
    fixed={**SILU, **NO_BIAS, **UNTIED, "norm_topk_prob": (False,), "clip_qkv": (None,)},
    # as many keys as queries, for the norm of all keys
    assumed=lambda data: {**even_heads(data), "num_key_value_heads": data["num_attention_heads"]},
)

DEEPSEEK_EXPERTS = (
    Key("expert_count", "n_routed_experts"),
    Key("expert_used_count", "num_experts_per_tok"),
    Key("expert_feed_forward_length", "moe_intermediate_size"),
    Key("expert_shared_count", "n_shared_experts"),
    Key("expert_weights_scale", "routed_scaling_factor", float, required=False),
    Key("expert_weights_norm", "norm_topk_prob", bool, required=False),
    Key("expert_group_count", "n_group", required=False),
    Key("expert_group_used_count", "topk_group", required=False),
    Key("leading_dense_block_count", "first_k_dense_replace", required=False),
)
DEEPSEEK_DEFAULTS = {
    **{"routed_scaling_factor": 1.0, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    "first_k_dense_replace": 0,
}
"""What llama.cpp takes for keys of `DEEPSEEK_EXPERTS` that a file does not have; the families here have others."""


def absent(own: Metadata) -> dict[str, Any]:
    """Return `DEEPSEEK_DEFAULTS` of the keys that a file does not have."""
    return {key.hf: DEEPSEEK_DEFAULTS[key.hf] for key in DEEPSEEK_EXPERTS if not (key.required or key.gguf in own)}


def _sigmoid(data: Mapping[str, Any]) -> Metadata:
    needs_shared(data)
    return {"expert_gating_func": SIGMOID}


def _only_sigmoid(own: Metadata, tensors: Container[str]) -> dict[str, Any]:
    """Raise WeightsError if a file has another score of experts than all models of its architecture."""
    if (found := own.get("expert_gating_func", SIGMOID)) != SIGMOID:
        raise WeightsError(f"the metadata has expert_gating_func={found}: only {SIGMOID} (sigmoid) is supported.")
    return {}


DEEPSEEK_LIKE: dict[str, Any] = {
    "keys": (*LLAMA_KEYS, *DEEPSEEK_EXPERTS),
    "derived": _sigmoid,
    "restored": lambda own, tensors: absent(own) | _only_sigmoid(own, tensors),
}
DOTS1 = Architecture(
    name="dots1",
    types=("dots1",),
    fixed={**SILU, **NO_BIAS, **UNTIED},
    assumed=lambda data: {"num_key_value_heads": data["num_attention_heads"]},
    **SHARED,
    **DEEPSEEK_LIKE,
)
GLM4_MOE = Architecture(
    name="glm4moe",
    types=("glm4_moe",),
    names=changed("ffn_norm", of=NAMES | SHARED_NAMES, post_attention_norm="norm_feedforward"),
    fixed=SILU,
    flags={"attention_bias": "blk.0.attn_q.bias", "use_qk_norm": "blk.0.attn_q_norm.weight"},
    **DEEPSEEK_LIKE,
)

GRANITE_MOE = Architecture(
    name="granitemoe",
    types=("granitemoe", "granitemoeshared"),
    keys=(
        *GRANITE.keys,
        Key("expert_count", "num_local_experts"),
        Key("expert_used_count", "num_experts_per_tok"),
        Key("expert_shared_feed_forward_length", "shared_intermediate_size", required=False),
    ),
    fixed={**SILU, **NO_BIAS},
    has_divisors=True,
    read_type=lambda own: "granitemoeshared" if own.get("expert_shared_feed_forward_length") else "granitemoe",
    **PAIRS,
    **SHARED,
)

HUNYUAN_MOE = Architecture(
    name="hunyuan-moe",
    types=("hunyuan_v1_moe",),
    keys=(
        *LLAMA_KEYS,
        Key("expert_count", "num_experts"),
        Key("expert_used_count", "moe_topk"),
        Key("expert_feed_forward_length", "intermediate_size"),
        Key("expert_shared_feed_forward_length", "intermediate_size"),
    ),
    fixed={**SILU, **NO_BIAS},
    **SHARED,
)

MINIMAX_M2 = Architecture(
    name="minimax-m2",
    types=("minimax_m2",),
    keys=(
        *LLAMA_KEYS,
        Key("expert_count", "num_local_experts"),
        Key("expert_used_count", "num_experts_per_tok"),
        Key("expert_feed_forward_length", "intermediate_size"),
    ),
    fixed={**SILU, **UNTIED},
    derived=lambda data: {"expert_gating_func": SIGMOID},
    restored=_only_sigmoid,
)

ERNIE_MOE = Architecture(
    name="ernie4_5-moe",
    types=("ernie4_5_moe",),
    keys=(
        *LLAMA_KEYS,
        Key("expert_count", "moe_num_experts"),
        Key("expert_used_count", "moe_k"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_count", "moe_num_shared_experts"),
        Key("interleave_moe_layer_step", "moe_layer_interval"),
        Key("leading_dense_block_count", "moe_layer_start_index"),
    ),
    fixed={**SILU, "use_bias": (False,), "moe_layer_interval": (1,)},
    assumed=lambda data: {"moe_layer_end_index": data["num_hidden_layers"] - 1},
    derived=lambda data: {
        "expert_shared_feed_forward_length": data["moe_num_shared_experts"] * data["moe_intermediate_size"]
    },
    **SHARED,
)

MIXTURES = (QWEN2_MOE, QWEN3_MOE, OLMOE, DOTS1, GLM4_MOE, GRANITE_MOE, HUNYUAN_MOE, MINIMAX_M2, ERNIE_MOE)
