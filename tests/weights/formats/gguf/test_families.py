"""Models of transformers, loaded here and written as GGUF, compute the same in llama.cpp."""

import pytest
import transformers as hf

import glassformer as gf
from glassformer.weights.export import write_gguf_file
from glassformer.weights.formats.gguf import check
from tests.weights.formats.gguf.models import NEEDS_LLAMA
from tests.weights.tiny import random_model, saved

SIZES = {
    **{"vocab_size": 97, "hidden_size": 36, "intermediate_size": 53, "num_hidden_layers": 3, "head_dim": 12},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
NARROW = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"hidden_size": 60}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
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
}


@pytest.mark.sample(4)
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
    assert found["llama.cpp-logits"].measured <= (2e-3 if case.startswith("gemma") else 1e-5) * largest
    assert found["llama.cpp-greedy"].measured <= 0.01
