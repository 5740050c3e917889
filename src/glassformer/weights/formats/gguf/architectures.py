"""The architectures of llama.cpp that models are written as and read from: one `Architecture` each.

To add one: list the keys of its metadata with the keys of config.json, the tensors whose names or layouts are not the
usual ones, and the values that llama.cpp assumes without a key. `write.py` and `read.py` use nothing else.
"""

from collections.abc import Callable, Mapping
from typing import Any

from glassformer.weights.errors import WeightsError
from glassformer.weights.formats.gguf.architecture import FUSED_NAMES, NAMES, Architecture, Key
from glassformer.weights.formats.gguf.layouts import PLUS_ONE, Interleaved
from glassformer.weights.hf.layouts import GATE_UP

GPT2 = Architecture(
    name="gpt2",
    types=("gpt2",),
    keys=(
        Key("context_length", "n_positions"),
        Key("embedding_length", "n_embd"),
        Key("block_count", "n_layer"),
        Key("feed_forward_length", "n_inner"),
        Key("attention.head_count", "n_head"),
        Key("attention.layer_norm_epsilon", "layer_norm_epsilon", float),
    ),
    names=FUSED_NAMES,
    fixed={"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,)},
    rotary=False,
)

SIZES = (
    Key("context_length", "max_position_embeddings"),
    Key("embedding_length", "hidden_size"),
    Key("block_count", "num_hidden_layers"),
    Key("feed_forward_length", "intermediate_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("attention.head_count_kv", "num_key_value_heads", required=False),
    Key("attention.key_length", "head_dim", required=False),
    Key("attention.value_length", "head_dim", required=False),
)
LLAMA_KEYS = (*SIZES, Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", float))
LAYER_NORM_KEYS = (*SIZES, Key("attention.layer_norm_epsilon", "layer_norm_eps", float))
SILU = {"hidden_act": ("silu", "swish")}

PAIRS: dict[str, Any] = {
    "layouts": lambda config: {"attn_q": Interleaved(config.n_heads), "attn_k": Interleaved(config.n_kv_heads)}
}
"""For architectures that llama.cpp rotates by neighbouring pairs, and Hugging Face by halves."""


def _names(*left_out: str, of: Mapping[str, str] = NAMES, **others: str) -> dict[str, str]:
    """Return the modules of a block without some, and with others."""
    return {name: ours for name, ours in of.items() if name not in left_out} | others


LLAMA = Architecture(
    name="llama",
    types=("llama", "mistral", "mixtral"),
    keys=(
        *LLAMA_KEYS,
        Key("expert_count", "num_local_experts", required=False),
        Key("expert_used_count", "num_experts_per_tok", required=False),
    ),
    fixed=SILU,
    flags={"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"},
    read_type=lambda own: "mixtral" if own.get("expert_count") else "llama",
    **PAIRS,
)

QWEN2 = Architecture(
    name="qwen2",
    types=("qwen2",),
    keys=LLAMA_KEYS,
    fixed=SILU,
    assumed=lambda data: {"head_dim": data["hidden_size"] // data["num_attention_heads"]},
)

QWEN3 = Architecture(
    name="qwen3",
    types=("qwen3",),
    keys=LLAMA_KEYS,
    fixed={**SILU, "attention_bias": (False,)},
)

QWEN3_MOE = Architecture(
    name="qwen3moe",
    types=("qwen3_moe",),
    keys=(
        *LLAMA_KEYS,
        Key("expert_count", "num_experts"),
        Key("expert_used_count", "num_experts_per_tok"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
    ),
    fixed={
        **SILU,
        "attention_bias": (False,),
        "norm_topk_prob": (True,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
)

OLMO2 = Architecture(
    name="olmo2",
    types=("olmo2",),
    keys=LLAMA_KEYS,
    names=_names("attn_norm", "ffn_norm", post_attention_norm="norm_attention", post_ffw_norm="norm_feedforward"),
    fixed={**SILU, "attention_bias": (False,)},
)

GEMMA_NORMS: dict[str, Any] = {
    "layouts": lambda config: {name: PLUS_ONE for name in NAMES if name.endswith("norm")},
    "norm": PLUS_ONE,
}
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")  # transformers computes all of them alike in Gemma
GEMMA_FIXED = {"tie_word_embeddings": (True,), "attention_bias": (False,)}

GEMMA = Architecture(
    name="gemma",
    types=("gemma",),
    keys=LLAMA_KEYS,
    fixed={**GEMMA_FIXED, "hidden_act": TANH_GELU},
    **GEMMA_NORMS,
)


def _gemma_scalar(largest: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return the rule of llama.cpp: the head width, but D/H in the largest model, known by its number of layers."""

    def assumed(data: Mapping[str, Any]) -> dict[str, Any]:
        by_heads = data["hidden_size"] // data["num_attention_heads"]
        is_largest = data["num_hidden_layers"] == largest
        return {"query_pre_attn_scalar": by_heads if is_largest else data.get("head_dim") or by_heads}

    return assumed


GEMMA2 = Architecture(
    name="gemma2",
    types=("gemma2",),
    keys=(
        *LLAMA_KEYS,
        Key("attn_logit_softcapping", "attn_logit_softcapping", float),
        Key("final_logit_softcapping", "final_logit_softcapping", float),
    ),
    fixed={**GEMMA_FIXED, "hidden_activation": TANH_GELU},
    has_windows=True,
    windows=lambda layer: layer % 2 == 0,
    assumed=_gemma_scalar(largest=46),
    **GEMMA_NORMS,
)

GEMMA3 = Architecture(
    name="gemma3",
    types=("gemma3_text",),
    keys=(*LLAMA_KEYS, Key("final_logit_softcapping", "final_logit_softcapping", float, required=False)),
    fixed={**GEMMA_FIXED, "hidden_activation": TANH_GELU},
    has_windows=True,
    windows=lambda layer: layer % 6 < 5,
    assumed=_gemma_scalar(largest=62),
    **GEMMA_NORMS,
)

PHI3 = Architecture(
    name="phi3",
    types=("phi3",),
    keys=LLAMA_KEYS,
    names=_names("ffn_gate", of=FUSED_NAMES, ffn_up=GATE_UP),
    fixed=SILU,
)

STABLELM = Architecture(
    name="stablelm",
    types=("stablelm",),
    keys=(*LAYER_NORM_KEYS, Key("use_parallel_residual", "use_parallel_residual", bool)),
    fixed={**SILU, "tie_word_embeddings": (False,)},
    flags={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
)


NO_BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}

GPT_NEOX = Architecture(
    name="gptneox",
    types=("gpt_neox",),
    keys=(*LAYER_NORM_KEYS, Key("use_parallel_residual", "use_parallel_residual", bool)),
    names=FUSED_NAMES,
    fixed={"hidden_act": ("gelu",), "attention_bias": (True,)},
)

BLOOM = Architecture(
    name="bloom",
    types=("bloom",),
    keys=(
        Key("embedding_length", "hidden_size"),
        Key("block_count", "n_layer"),
        Key("attention.head_count", "n_head"),
        Key("attention.layer_norm_epsilon", "layer_norm_epsilon", float),
    ),
    names=FUSED_NAMES,
    rotary=False,
    # it was trained with 2,048 positions; ALiBi knows no longest one
    derived=lambda data: {"context_length": 2048, "feed_forward_length": 4 * data["hidden_size"]},
)

STARCODER2 = Architecture(
    name="starcoder2",
    types=("starcoder2",),
    keys=(*SIZES, Key("attention.layer_norm_epsilon", "norm_epsilon", float)),
    fixed={"hidden_act": ("gelu_pytorch_tanh", "gelu_new"), "use_bias": (True,)},
)

PHI2 = Architecture(
    name="phi2",
    types=("phi",),
    keys=LAYER_NORM_KEYS,
    fixed={"hidden_act": ("gelu_new", "gelu_pytorch_tanh"), "qk_layernorm": (False,), "tie_word_embeddings": (False,)},
)

GRANITE = Architecture(
    name="granite",
    types=("granite",),
    keys=(
        *LLAMA_KEYS,
        Key("embedding_scale", "embedding_multiplier", float),
        Key("residual_scale", "residual_multiplier", float),
        Key("attention.scale", "attention_multiplier", float),
        Key("logit_scale", "logits_scaling", float),
    ),
    fixed={**SILU, **NO_BIASES},
    **PAIRS,
)

OLMO = Architecture(
    name="olmo",
    types=("olmo",),
    keys=(*SIZES, Key("attention.clamp_kqv", "clip_qkv", float, required=False)),
    fixed={**SILU, "attention_bias": (False,)},
    derived=lambda data: {"attention.layer_norm_epsilon": 1e-5},
    **PAIRS,
)

OLMOE = Architecture(
    name="olmoe",
    types=("olmoe",),
    keys=(*LLAMA_KEYS, Key("expert_count", "num_experts"), Key("expert_used_count", "num_experts_per_tok")),
    fixed={**SILU, "attention_bias": (False,), "norm_topk_prob": (False,), "clip_qkv": (None,)},
    assumed=lambda data: {"num_key_value_heads": data["num_attention_heads"]},  # for the norm of all keys
)

COHERE = Architecture(
    name="command-r",
    types=("cohere",),
    keys=(*LAYER_NORM_KEYS, Key("logit_scale", "logit_scale", float)),
    fixed={**SILU, "attention_bias": (False,), "use_qk_norm": (False,), "tie_word_embeddings": (True,)},
)


def _rotated_layers(data: Mapping[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no positions."""
    return {"no_rope_layers": [int((i + 1) % 4 > 0) for i in range(data["num_hidden_layers"])]}


SMOLLM3 = Architecture(
    name="smollm3",
    types=("smollm3",),
    keys=LLAMA_KEYS,
    fixed={**SILU, **NO_BIASES},
    assumed=_rotated_layers,
    **PAIRS,
)

ARCEE = Architecture(
    name="arcee", types=("arcee",), keys=LLAMA_KEYS, fixed={"hidden_act": ("relu2",), **NO_BIASES}, **PAIRS
)

SEED_OSS = Architecture(
    name="seed_oss",
    types=("seed_oss",),
    keys=LLAMA_KEYS,
    names=_names("ffn_norm", post_attention_norm="norm_feedforward"),
    fixed={**SILU, "attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,)},
)

ERNIE = Architecture(name="ernie4_5", types=("ernie4_5",), keys=LLAMA_KEYS, fixed={**SILU, "use_bias": (False,)})

GLM4 = Architecture(
    name="glm4",
    types=("glm4",),
    keys=LLAMA_KEYS,
    names=_names("ffn_gate", ffn_up=GATE_UP),
    fixed=SILU,
    flags={"attention_bias": "blk.0.attn_q.bias"},
)

EXAONE4 = Architecture(
    name="exaone4",
    types=("exaone4",),
    keys=LLAMA_KEYS,
    names=OLMO2.names,
    fixed={**SILU, "sliding_window": (None,)},
)

ARCHITECTURES = (
    *(GPT2, LLAMA, QWEN2, QWEN3, QWEN3_MOE, OLMO, OLMO2, OLMOE, GEMMA, GEMMA2, GEMMA3, PHI2, PHI3, STABLELM, GPT_NEOX),
    *(BLOOM, STARCODER2, GRANITE, COHERE, SMOLLM3, ARCEE, SEED_OSS, ERNIE, GLM4, EXAONE4),
)
"""Every architecture. Those of families that are not read yet are used when they are."""
TYPES = frozenset(kind for architecture in ARCHITECTURES for kind in architecture.types)
"""The Hugging Face model types that can be written."""


def find(name: object) -> Architecture:
    """Return an architecture by the value of `general.architecture`."""
    for architecture in ARCHITECTURES:
        if architecture.name == name:
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise WeightsError(f"general.architecture={name!r} is not known: known are {known}.")


def for_type(model_type: str) -> Architecture:
    """Return the architecture as which a Hugging Face model type is written."""
    for architecture in ARCHITECTURES:
        if model_type in architecture.types:
            return architecture
    known = ", ".join(kind for architecture in ARCHITECTURES for kind in architecture.types)
    raise WeightsError(f"a {model_type} model cannot be written as GGUF: known types are {known}; use --to hf.")
