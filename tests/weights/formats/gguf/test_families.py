"""Models of transformers, loaded here and written as GGUF, compute the same in llama.cpp."""

import pytest
import torch
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
FALCON = {
    **{"vocab_size": 97, "hidden_size": 60, "ffn_hidden_size": 53, "num_hidden_layers": 3, "num_attention_heads": 6},
    **{"bias": False, "bos_token_id": 1, "eos_token_id": 2},
}
BIGCODE = {
    **{"vocab_size": 97, "n_embd": 60, "n_inner": 53, "n_layer": 3, "n_head": 6, "n_positions": 64},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
DEEPSEEK = {
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7},
}
LATENT = {
    **{key: value for key, value in {**SIZES, **DEEPSEEK}.items() if key not in ("head_dim", "num_key_value_heads")},
    **{"num_key_value_heads": 6, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8, "v_head_dim": 18},
}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 16},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 8, "beta_slow": 1},
}
GRANITE = {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0}
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
    "olmo3": ("Olmo3", {**NARROW, **WINDOWS}),
    "olmo3, scaled": ("Olmo3", {**NARROW, **WINDOWS, "rope_parameters": {**YARN, "attention_factor": 1.2}}),
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
    "falcon": ("Falcon", FALCON),
    "falcon, two norms": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, 11b": (
        "Falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon, heads": ("Falcon", {**FALCON, "multi_query": False}),
    "gpt_bigcode": ("GPTBigCode", BIGCODE),
    "gpt_bigcode, heads": ("GPTBigCode", {**BIGCODE, "multi_query": False}),
    "nemotron": ("Nemotron", {**NARROW, "partial_rotary_factor": 0.6}),
    "jais2": ("Jais2", NARROW),
    "cohere2": ("Cohere2", {**NARROW, "logit_scale": 0.3, **WINDOWS}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", SIZES),
    "glm": ("Glm", {**SIZES, "attention_bias": True, "hidden_size": 72}),
    "qwen2moe": (
        "Qwen2Moe",
        {**NARROW, **EXPERTS, "shared_expert_intermediate_size": 44, "norm_topk_prob": False},
    ),
    "dots1": ("Dots1", {**SIZES, **DEEPSEEK, "num_key_value_heads": 6}),
    "dots1, one group": (
        "Dots1",
        {**SIZES, **DEEPSEEK, "num_key_value_heads": 6, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
    "glm4_moe": ("Glm4Moe", {**SIZES, **DEEPSEEK, "partial_rotary_factor": 0.5, "use_qk_norm": True}),
    "glm4_moe, biases": ("Glm4Moe", {**SIZES, **DEEPSEEK, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "solar_open": ("SolarOpen", {**SIZES, **DEEPSEEK}),
    "granitemoe": ("GraniteMoe", {**NARROW, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe, shared": (
        "GraniteMoeShared",
        {**NARROW, **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 44},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {**SIZES, "num_experts": 5, "moe_topk": 2}),
    "minimax_m2": ("MiniMaxM2", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**SIZES, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 40, "moe_layer_start_index": 1},
    ),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "n_group": 2, "topk_group": 1, "n_routed_experts": 8}),
    "deepseek_v3, whole queries": ("DeepseekV3", {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3, yarn": ("DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1, "rope_parameters": YARN}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v2, yarn": (
        "DeepseekV2",
        {**LATENT, "topk_method": "greedy", "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    # transformers has 1e-6 in the norms of latent vectors, llama.cpp the epsilon of all norms
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "rms_norm_eps": 1e-6}),
    "youtu": ("Youtu", LATENT),
}


NAMES = {
    "olmo3": "olmo2",
    "phi": "phi2",
    "cohere": "command-r",
    "gpt_neox": "gptneox",
    "gpt_bigcode": "starcoder",
    "glm": "chatglm",
}
NAMES |= {"hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe", "minimax_m2": "minimax-m2"}
NAMES |= {"glm4_moe": "glm4moe", "solar_open": "glm4moe", "ernie4_5_moe": "ernie4_5-moe"}
NAMES |= dict.fromkeys(("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "youtu"), "deepseek2")


def architecture_of(case):
    if case == "gpt_bigcode, heads":
        return "gpt2"  # the first architecture that computes the same
    name = case.partition(",")[0].replace(" ", "")
    return NAMES.get(name, name)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of GPT-BigCode
@pytest.mark.sample(14)
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
    ours, back = model.state_dict(), gf.load(tmp_path / "m.gguf").state_dict()
    for key, tensor in back.items():  # norms may be stored as 1 + weight, and biases of zero may be added
        rounding = 3e-7 if key.endswith("norm.weight") or "norm_" in key else 0.0
        assert (ours.get(key, torch.zeros(())) - tensor).abs().max() <= rounding, key
    assert ours.keys() <= back.keys()
