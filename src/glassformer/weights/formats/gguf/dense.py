"""Architectures of llama.cpp with dense feed-forwards, and `llama`, which may have experts."""

from collections.abc import Callable, Container, Mapping
from typing import Any

from glassformer.weights.formats.gguf.architecture import (
    FUSED_NAMES,
    WINDOW,
    Architecture,
    Key,
    Metadata,
    Positions,
    Windows,
    changed,
)
from glassformer.weights.formats.gguf.layouts import PLUS_ONE, Interleaved
from glassformer.weights.formats.gguf.rope import read_one_base, write_one_base
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
    rope=None,
)

STARCODER = Architecture(
    name="starcoder",
    types=("gpt_bigcode",),
    keys=GPT2.keys,
    names=FUSED_NAMES,
    fixed={**GPT2.fixed, "attention_softmax_in_fp32": (True,)},
    rope=None,
    derived=lambda data: {"attention.head_count_kv": 1 if data["multi_query"] else data["n_head"]},
    restored=lambda own, tensors: {"multi_query": own.get("attention.head_count_kv") == 1},
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
UNTIED = {"tie_word_embeddings": (False,)}
TIED = {"tie_word_embeddings": (True,)}
NO_BIAS = {"attention_bias": (False,)}
NO_BIASES = {**NO_BIAS, "mlp_bias": (False,)}


def even_heads(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the width of a head where llama.cpp expects the output of attention to be as wide as the model."""
    return {"head_dim": data["hidden_size"] // data["num_attention_heads"]}


PAIRS: dict[str, Any] = {
    "layouts": lambda config: {"attn_q": Interleaved(config.n_heads), "attn_k": Interleaved(config.n_kv_heads)}
}
"""For architectures that llama.cpp rotates by neighbouring pairs, and Hugging Face by halves."""


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
    has_divisors=True,
    read_type=lambda own: "mixtral" if own.get("expert_count") else "llama",
    **PAIRS,
)

QWEN2 = Architecture(
    name="qwen2",
    types=("qwen2",),
    keys=LLAMA_KEYS,
    fixed=SILU,
    assumed=even_heads,
)

QWEN3 = Architecture(
    name="qwen3",
    types=("qwen3",),
    keys=LLAMA_KEYS,
    fixed={**SILU, **NO_BIAS},
)

OLMO2 = Architecture(
    name="olmo2",
    types=("olmo2", "olmo3"),
    windows=Windows(lambda layer: layer % 4 < 3),
    rope=Positions(write_one_base, read_one_base),
    read_type=lambda own: "olmo3" if own.get(WINDOW) else "olmo2",
    keys=LLAMA_KEYS,
    names=changed("attn_norm", "ffn_norm", post_attention_norm="norm_attention", post_ffw_norm="norm_feedforward"),
    fixed={**SILU, **NO_BIAS, **UNTIED},
    assumed=even_heads,
)

TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu")  # transformers computes all of them alike in Gemma
GEMMA_FIXED = {**TIED, **NO_BIAS}

GEMMA = Architecture(
    name="gemma",
    types=("gemma",),
    keys=LLAMA_KEYS,
    fixed={**GEMMA_FIXED, "hidden_act": TANH_GELU},
    norm=PLUS_ONE,
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
    windows=Windows(lambda layer: layer % 2 == 0, default=4096, required=True),
    assumed=_gemma_scalar(largest=46),
    norm=PLUS_ONE,
)

GEMMA3 = Architecture(
    name="gemma3",
    types=("gemma3_text",),
    keys=(*LLAMA_KEYS, Key("final_logit_softcapping", "final_logit_softcapping", float, required=False)),
    fixed={**GEMMA_FIXED, "hidden_activation": TANH_GELU},
    windows=Windows(lambda layer: layer % 6 < 5),
    assumed=_gemma_scalar(largest=62),
    norm=PLUS_ONE,
)

PHI3 = Architecture(
    name="phi3",
    types=("phi3",),
    keys=LLAMA_KEYS,
    names=changed("ffn_gate", of=FUSED_NAMES, ffn_up=GATE_UP),
    fixed=SILU,
    assumed=even_heads,
)

STABLELM = Architecture(
    name="stablelm",
    types=("stablelm",),
    keys=(*LAYER_NORM_KEYS, Key("use_parallel_residual", "use_parallel_residual", bool)),
    fixed={**SILU, **UNTIED},
    flags={"use_qkv_bias": "blk.0.attn_q.bias", "qk_layernorm": "blk.0.attn_q_norm.weight"},
)

GPT_NEOX = Architecture(
    name="gptneox",
    types=("gpt_neox",),
    keys=(*LAYER_NORM_KEYS, Key("use_parallel_residual", "use_parallel_residual", bool)),
    names=FUSED_NAMES,
    fixed={"hidden_act": ("gelu",), "attention_bias": (True,), **UNTIED},
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
    rope=None,
    # it was trained with 2,048 positions; ALiBi knows no longest one
    derived=lambda data: {"context_length": 2048, "feed_forward_length": 4 * data["hidden_size"]},
)

STARCODER2 = Architecture(
    name="starcoder2",
    types=("starcoder2",),
    keys=(*SIZES, Key("attention.layer_norm_epsilon", "norm_epsilon", float)),
    fixed={"hidden_act": ("gelu_pytorch_tanh", "gelu_new"), "use_bias": (True,)},
    assumed=even_heads,
)

PHI2 = Architecture(
    name="phi2",
    types=("phi",),
    keys=LAYER_NORM_KEYS,
    fixed={"hidden_act": ("gelu_new", "gelu_pytorch_tanh"), "qk_layernorm": (False,), **UNTIED},
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
    has_divisors=True,
    **PAIRS,
)

OLMO = Architecture(
    name="olmo",
    types=("olmo",),
    keys=(*SIZES, Key("attention.clamp_kqv", "clip_qkv", float, required=False)),
    fixed={**SILU, **NO_BIAS},
    assumed=even_heads,
    derived=lambda data: {"attention.layer_norm_epsilon": 1e-5},
    **PAIRS,
)

COHERE = Architecture(
    name="command-r",
    types=("cohere",),
    keys=(*LAYER_NORM_KEYS, Key("logit_scale", "logit_scale", float)),
    fixed={**SILU, **NO_BIAS, **TIED, "use_qk_norm": (False,)},
    assumed=even_heads,
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
    name="arcee",
    types=("arcee",),
    keys=LLAMA_KEYS,
    fixed={"hidden_act": ("relu2",), **NO_BIASES},
    has_divisors=True,
    **PAIRS,
)

SEED_OSS = Architecture(
    name="seed_oss",
    types=("seed_oss",),
    keys=LLAMA_KEYS,
    names=changed("ffn_norm", post_attention_norm="norm_feedforward"),
    fixed={**SILU, "attention_bias": (True,), "attention_out_bias": (False,), "mlp_bias": (False,)},
)

ERNIE = Architecture(name="ernie4_5", types=("ernie4_5",), keys=LLAMA_KEYS, fixed={**SILU, "use_bias": (False,)})

GLM4 = Architecture(
    name="glm4",
    types=("glm4",),
    keys=LLAMA_KEYS,
    names=changed("ffn_gate", ffn_up=GATE_UP),
    fixed=SILU,
    flags={"attention_bias": "blk.0.attn_q.bias"},
)

EXAONE4 = Architecture(
    name="exaone4",
    types=("exaone4",),
    keys=LLAMA_KEYS,
    names=OLMO2.names,
    fixed={**SILU, "sliding_window": (None,)},
    assumed=even_heads,
    has_divisors=True,
)


def _falcon(own: Metadata, tensors: Container[str]) -> dict[str, Any]:
    two, groups = "blk.0.attn_norm_2.weight" in tensors, own["attention.head_count_kv"]
    new = two or groups not in (1, own["attention.head_count"])
    norms = 2 if two else 1 if new else None
    return {"new_decoder_architecture": new, "num_ln_in_parallel_attn": norms, "multi_query": groups == 1}


FALCON = Architecture(
    name="falcon",
    types=("falcon",),
    keys=(
        Key("context_length", "max_position_embeddings"),
        Key("embedding_length", "hidden_size"),
        Key("block_count", "num_hidden_layers"),
        Key("feed_forward_length", "ffn_hidden_size"),
        Key("attention.head_count", "num_attention_heads"),
        Key("attention.head_count_kv", "num_kv_heads"),
        Key("attention.layer_norm_epsilon", "layer_norm_epsilon", float),
    ),
    # with two norms, that of attention is the second one
    names=changed("ffn_norm", of=FUSED_NAMES, attn_norm_2="norm_attention", attn_norm="norm_feedforward"),
    fixed={"activation": ("gelu",), "alibi": (False,), "bias": (False,), "parallel_attn": (True,)},
    restored=_falcon,
)

NEMOTRON = Architecture(
    name="nemotron",
    types=("nemotron",),
    keys=(*SIZES, Key("attention.layer_norm_epsilon", "norm_eps", float)),
    fixed={"hidden_act": ("relu2",), **UNTIED},
    flags=LLAMA.flags,
    assumed=even_heads,
    norm=PLUS_ONE,
)

JAIS2 = Architecture(
    name="jais2",
    types=("jais2",),
    keys=LAYER_NORM_KEYS,
    fixed={"hidden_act": ("relu2",), "attention_bias": (True,), "mlp_bias": (True,)},
)

COHERE2 = Architecture(
    name="cohere2",
    types=("cohere2",),
    keys=COHERE.keys,
    fixed={**SILU, **NO_BIAS, **TIED},
    assumed=even_heads,
    windows=Windows(lambda layer: layer % 4 < 3, default=4096, required=True),
)

HUNYUAN = Architecture(
    name="hunyuan-dense",
    types=("hunyuan_v1_dense",),
    keys=LLAMA_KEYS,
    fixed={**SILU, **NO_BIAS},
)

GLM = Architecture(
    name="chatglm",
    types=("glm",),
    keys=LLAMA_KEYS,
    names=GLM4.names,
    fixed=SILU,
    flags=GLM4.flags,
    assumed=even_heads,
)

DENSE = (
    *(GPT2, STARCODER, LLAMA, QWEN2, QWEN3, OLMO2, GEMMA, GEMMA2, GEMMA3),
    *(PHI3, STABLELM, GPT_NEOX, BLOOM, STARCODER2, PHI2, GRANITE, OLMO, COHERE),
    *(SMOLLM3, ARCEE, SEED_OSS, ERNIE, GLM4, EXAONE4, FALCON, NEMOTRON, JAIS2),
    *(COHERE2, HUNYUAN, GLM),
)
