"""Models of transformers, loaded here and written as GGUF, compute the same in llama.cpp."""

import pytest
import transformers as hf

import glassformer as gf
from glassformer.weights.export import write_gguf_file
from glassformer.weights.formats.gguf import check
from glassformer.weights.formats.gguf.file import open_gguf
from tests.weights.formats.gguf.models import NEEDS_LLAMA
from tests.weights.tiny import random_model, saved

SIZES = {
    **{"vocab_size": 97, "hidden_size": 36, "intermediate_size": 53, "num_hidden_layers": 3, "head_dim": 12},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
NARROW = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"hidden_size": 60}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FULL = ["full_attention"] * 3
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
CASES = {
    "gemma": ("Gemma", SIZES),
    "gemma2": ("Gemma2", {**SIZES, **CAPS, **WINDOWS, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3", {**SIZES, **WINDOWS, "query_pre_attn_scalar": 12, "rope_parameters": ROPES}),
    "phi3": ("Phi3", {**NARROW, "partial_rotary_factor": 0.6}),
    "stablelm": ("StableLm", {**NARROW, "use_qkv_bias": True, "partial_rotary_factor": 0.4}),
    "stablelm, 12b": (
        "StableLm",
        {**NARROW, "qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.4},
    ),
    "llama": ("Llama", SIZES),
    "qwen3": ("Qwen3", SIZES),
    "qwen3 moe": (
        "Qwen3Moe",
        {**SIZES, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "olmo2": ("Olmo2", NARROW),
    "gpt_neox": ("GPTNeoX", {**NARROW, "rotary_pct": 0.4}),
    "gpt_neox, not parallel": ("GPTNeoX", {**NARROW, "rotary_pct": 0.4, "use_parallel_residual": False}),
    "bloom": ("Bloom", {"vocab_size": 97, "hidden_size": 60, "n_layer": 3, "n_head": 6, "bos_token_id": 1}),
    "starcoder2": ("Starcoder2", {**NARROW, "sliding_window": None}),
    "phi": ("Phi", {**NARROW, "partial_rotary_factor": 0.6}),
    "granite": (
        "Granite",
        {**NARROW, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
        | {"logits_scaling": 2.0},
    ),
    "olmo": ("Olmo", {**NARROW, "clip_qkv": 0.7}),
    "olmoe": ("Olmoe", {**NARROW, "num_key_value_heads": 6, "num_experts": 5, "num_experts_per_tok": 2}),
    "cohere": ("Cohere", {**NARROW, "logit_scale": 0.3}),
    "smollm3": ("SmolLM3", {**NARROW, "num_hidden_layers": 5}),
    "arcee": ("Arcee", SIZES),
    "seed_oss": ("SeedOss", SIZES),
    "ernie4_5": ("Ernie4_5", SIZES),
    "glm4": ("Glm4", {**SIZES, "attention_bias": True}),
    "exaone4": ("Exaone4", {**NARROW, "sliding_window": None, "sliding_window_pattern": None, "layer_types": FULL}),
}


NAMES = {"phi": "phi2", "cohere": "command-r", "gpt_neox": "gptneox"}


def architecture_of(case):
    name = case.partition(",")[0].replace(" ", "")
    return NAMES.get(name, name)


@pytest.mark.sample(8)
@NEEDS_LLAMA
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(tmp_path, case):
    name, settings = CASES[case]
    cls = getattr(hf, name + "ForCausalLM")
    folder = saved(random_model(cls, cls.config_class(**settings)), tmp_path / "hf")
    model = gf.load(folder)
    _, findings, _ = write_gguf_file(model, tmp_path / "m.gguf", "f32")
    found = {finding.id: finding for finding in findings}
    largest = found["llama.cpp-logits"].bound / check.relative_bound(model.config, "f32")
    loose = 2e-3 if "gelu" in str(model.config.feedforward) else 1e-5  # llama.cpp reads GELU from a table
    assert found["llama.cpp-logits"].measured <= loose * largest
    assert open_gguf(tmp_path / "m.gguf").metadata["general.architecture"] == architecture_of(case)
    assert found["llama.cpp-greedy"].measured <= 0.01
