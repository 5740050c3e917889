"""Every decoder family: the logits of transformers, padded on either side, and the way back.

The settings are those in which each feature moves the logits (see `CONTROLS`, which turns each one off).
"""

import dataclasses
import json

import pytest
import torch
import transformers as hf

from glassformer import config as c
from glassformer.weights import load
from glassformer.weights.hf import DECODERS
from tests.weights.tiny import BOUND, batch, decoder_gap, gap, logits_of, random_model, round_trip, saved

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of GPT-BigCode

# D is a perfect square: transformers rounds sqrt(D) to float32 in its embeddings
SIZES = {
    **{"vocab_size": 97, "hidden_size": 36, "intermediate_size": 53, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 10},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

NARROW = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"hidden_size": 60}
"""For families in which D is H times K."""
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT = {**IDS, "vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
FALCON = {**IDS, "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6}
OPT = {
    **{"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "ffn_dim": 53, "num_attention_heads": 4},
    **{"max_position_embeddings": 64, "word_embed_proj_dim": 48, "bos_token_id": 2, "pad_token_id": 1},
}
WINDOWS = {"sliding_window": 4, "layer_types": MIXED}
CAPS = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.8, "query_pre_attn_scalar": 13}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {
        **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    },
}
NEO = {"hidden_size": 48, "num_layers": 3, "num_heads": 4, "intermediate_size": 53, "window_size": 4}
NO_GROUPS = {name: value for name, value in NARROW.items() if name != "num_key_value_heads"}
FACTORS = {
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0},
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 17, "norm_topk_prob": True}
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
ROUTED = {
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 17, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
}


def longrope(original, pairs):
    """Settings of Phi-3 with LongRoPE, for a head with this many rotated pairs."""
    factors = {"short_factor": [1.0 + i / 8 for i in range(pairs)], "long_factor": [1.5 + i for i in range(pairs)]}
    table = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": original, **factors}
    return {"rope_parameters": table, "original_max_position_embeddings": original}


YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK = {
    **{name: value for name, value in SIZES.items() if name not in ("head_dim", "num_key_value_heads")},
    **{**ROUTED, "kv_lora_rank": 14, "q_lora_rank": 18, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6},
    **{"v_head_dim": 8, "num_key_value_heads": 6},
}

# name of the transformers class without its ending, and the settings
CASES = {
    "gemma": ("Gemma", SIZES),
    "gemma2": ("Gemma2", {**SIZES, **CAPS, "sliding_window": 4}),
    "gemma3": ("Gemma3", {**SIZES, **WINDOWS, "query_pre_attn_scalar": 13}),
    "phi": ("Phi", {**NARROW, "qk_layernorm": True, "partial_rotary_factor": 0.4}),
    "phi3": ("Phi3", {**NARROW, "sliding_window": 4, "partial_rotary_factor": 0.6}),
    "phi3, long, before the change": ("Phi3", {**NARROW, **longrope(32, 5)}),
    "phi3, long, after the change": ("Phi3", {**NARROW, **longrope(2, 5)}),
    "gpt_neox": ("GPTNeoX", {**NARROW, "rotary_pct": 0.4}),
    "gpt_neox, pre-norm": ("GPTNeoX", {**NARROW, "use_parallel_residual": False, "attention_bias": False}),
    "gptj": ("GPTJ", {**GPT, "rotary_dim": 8}),
    "codegen": ("CodeGen", {**GPT, "rotary_dim": 8}),
    "gpt_neo": ("GPTNeo", {**SIZES, **NEO, "attention_types": [[["global", "local"], 1], [["local"], 1]]}),
    "opt": ("OPT", OPT),
    "opt, projected": ("OPT", {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt, projected, pre-norm": ("OPT", {**OPT, "word_embed_proj_dim": 40, "tie_word_embeddings": False}),
    "opt, post-norm": (
        "OPT",
        {**OPT, "do_layer_norm_before": False, "enable_bias": False, "layer_norm_elementwise_affine": False},
    ),
    "biogpt": ("BioGpt", {**NO_GROUPS, "hidden_size": 36}),
    "bloom": ("Bloom", {**IDS, "vocab_size": 97, "hidden_size": 48, "n_layer": 3, "n_head": 6}),
    "mpt": (
        "Mpt",
        {**IDS, "vocab_size": 97, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64}
        | {"attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}},
    ),
    "falcon 7b": ("Falcon", FALCON),
    "falcon 40b": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "Falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    # 12 heads: some slopes are not powers of two, so that their rounding shows
    "falcon rw": (
        "Falcon",
        {
            **FALCON,
            "alibi": True,
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "num_attention_heads": 12,
        },
    ),
    "stablelm": ("StableLm", {**NARROW, "use_qkv_bias": True, "partial_rotary_factor": 0.4}),
    "stablelm 12b": (
        "StableLm",
        {**NARROW, "qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.4},
    ),
    "olmo": ("Olmo", {**NARROW, "clip_qkv": 0.5}),
    "olmo2": ("Olmo2", SIZES),
    "olmo3": ("Olmo3", {**SIZES, **WINDOWS, "rope_parameters": ROPES}),
    "granite": ("Granite", {**SIZES, **FACTORS}),
    "cohere": ("Cohere", {**NARROW, "logit_scale": 0.5}),
    "cohere, q/k norm": ("Cohere", {**NARROW, "use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**SIZES, **WINDOWS, "logit_scale": 0.5}),
    "smollm3": ("SmolLM3", {**NARROW, "no_rope_layers": [1, 0, 1]}),
    "starcoder2": ("Starcoder2", {**NARROW, "sliding_window": 4}),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "gpt_bigcode, many keys": ("GPTBigCode", {**GPT, "multi_query": False}),
    "glm": ("Glm", {**SIZES, "partial_rotary_factor": 0.4}),
    "glm4": ("Glm4", {**SIZES, "partial_rotary_factor": 0.4}),
    "nemotron": ("Nemotron", {**SIZES, "partial_rotary_factor": 0.4}),
    "arcee": ("Arcee", SIZES),
    "jais2": ("Jais2", SIZES),
    "helium": ("Helium", {**SIZES, "hidden_size": 60}),
    "ernie4_5": ("Ernie4_5", {**SIZES, "use_bias": True}),
    "seed_oss": ("SeedOss", SIZES),
    "cwm": ("Cwm", {**SIZES, **WINDOWS}),
    "ministral": ("Ministral", {**SIZES, **WINDOWS}),
    "persimmon": ("Persimmon", {**NO_GROUPS, "partial_rotary_factor": 0.4}),
    "vaultgemma": ("VaultGemma", {**SIZES, **CAPS, **WINDOWS}),
    "exaone4": ("Exaone4", {**SIZES, **WINDOWS, "sliding_window_pattern": 2}),
    "qwen2_moe": ("Qwen2Moe", {**NARROW, **EXPERTS, "shared_expert_intermediate_size": 29, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **EXPERTS, "decoder_sparse_step": 2}),
    "olmoe": ("Olmoe", {**NARROW, **EXPERTS, "clip_qkv": 0.5}),
    "flex_olmo": ("FlexOlmo", {**NARROW, **EXPERTS}),
    "gpt_oss": ("GptOss", {**SIZES, **WINDOWS, **LOCAL, "swiglu_limit": 0.5, "rope_parameters": YARN}),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "n_group": 3, "topk_group": 2}),
    "deepseek_v3, halves": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, "attention_bias": True},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "norm_topk_prob": False},
    ),
    "dots1": ("Dots1", {**SIZES, **ROUTED, "sliding_window": 4, "max_window_layers": 1, "layer_types": MIXED}),
    "glm4_moe": ("Glm4Moe", {**SIZES, **ROUTED, "use_qk_norm": True, "partial_rotary_factor": 0.4}),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"} | {"n_group": 3, "topk_group": 2},
    ),
    "solar_open": ("SolarOpen", {**SIZES, **ROUTED, "attention_bias": True}),
    # with a padding id, transformers zeroes that row of a tied table when it loads its own files
    "youtu": (
        "Youtu",
        {**{k: v for k, v in DEEPSEEK.items() if k not in ROUTED}, "attention_bias": True, "pad_token_id": None},
    ),
    "granitemoe": ("GraniteMoe", {**NARROW, **FACTORS, **LOCAL}),
    "granitemoeshared": ("GraniteMoeShared", {**NARROW, **FACTORS, **LOCAL, "shared_intermediate_size": 29}),
    "minimax_m2": ("MiniMaxM2", {**SIZES, **LOCAL, "rotary_dim": 4}),
    "ernie4_5_moe, biases": (
        "Ernie4_5_Moe",
        {
            **{**NARROW, "use_bias": True, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 17},
            **{"moe_layer_start_index": 1, "moe_layer_end_index": 1},
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**NARROW, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 17, "moe_layer_start_index": 1},
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", SIZES),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {**SIZES, "num_experts": 6, "moe_topk": 2}),
}
NOT_EXACT = {"gptj": 1e-6, "codegen": 1e-6, **{f"phi3, long, {when} the change": 1e-6 for when in ("before", "after")}}
"""Families that transformers cannot compute in float64: they keep sines, cosines or divisors in float32."""
FUSED = ("falcon rw",)
"""Cases in which transformers is right with its fused attention only: its other path adds ALiBi twice."""


def config_of(case):
    name, settings = CASES[case]
    config = getattr(hf, f"{name}Config", None) or getattr(hf, f"{name}TextConfig")
    if name == "Gemma3":
        config = hf.Gemma3TextConfig
    return getattr(hf, f"{name}ForCausalLM"), config(**settings)


def reference(case, dtype):
    return random_model(*config_of(case), dtype, attention=attention_of(case))


def attention_of(case):
    return "sdpa" if case in FUSED else "eager"


def relative(model, folder, side, dtype):
    """The largest difference over real tokens, relative to the largest logit."""
    return decoder_gap(model, folder, side, dtype) / float(logits_of(model, side, dtype).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_in_float64(tmp_path, case):
    model = reference(case, torch.float64)
    folder = saved(model, tmp_path)
    assert relative(model, folder, "left", torch.float64) <= NOT_EXACT.get(case, BOUND[torch.float64])


@pytest.mark.sample(16)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_and_the_way_back(tmp_path, case):
    model = reference(case, torch.float32)
    folder = saved(model, tmp_path / "in")
    for side in ("right", "left"):
        assert relative(model, folder, side, torch.float32) <= BOUND[torch.float32], side
    out = round_trip(model, folder, tmp_path, lambda m: m(batch("none")[0]).logits, attention=attention_of(case))
    assert json.loads((out / "config.json").read_text())["model_type"] == model.config.model_type


def change_router(moe, **changes):
    return dataclasses.replace(moe, router=dataclasses.replace(moe.router, **changes))


def change_expert(moe, **changes):
    return dataclasses.replace(moe, expert=dataclasses.replace(moe.expert, **changes))


def change_kinds(kinds, **changes):
    feedforwards = [dataclasses.replace(kind.feedforward, **changes) for kind in kinds]
    return tuple(dataclasses.replace(k, feedforward=f) for k, f in zip(kinds, feedforwards, strict=True))


def without_correction(state):
    return {name: torch.zeros_like(v) if name.endswith("router.correction") else v for name, v in state.items()}


def without_sinks(state):
    return {name: torch.full_like(v, -1e9) if name.endswith("sinks") else v for name, v in state.items()}


# A feature of a family turned off: the error must then be at least this large. Functions change the present value.
CONTROLS = {
    "long divisors": (
        "phi3, long, after the change",
        {
            "position": lambda rotary: dataclasses.replace(
                rotary, scaling=dataclasses.replace(rotary.scaling, original_max_len=64)
            )
        },
    ),
    "norm offset": ("gemma", {"norm": c.RMSNorm()}),
    "LayerNorm offset": ("nemotron", {"norm": c.LayerNorm()}),
    "embedding scale": ("gemma", {"embedding": c.Embedding()}),
    "score cap": ("gemma2", {"attention__softcap": None}),
    "logit cap": ("gemma2", {"head__softcap": None}),
    "windows": ("gemma2", {"attention__window": 64}),
    "bases by layer": ("gemma3", {"layer_kinds": ()}),
    "scaling by layer": ("olmo3", {"layer_kinds": ()}),
    "q/k norm offset": ("gemma3", {"attention__qk_norm": c.RMSNorm()}),
    "rotated fraction": ("phi", {"position": c.Rotary(fraction=0.8)}),
    "interleaved": ("glm4", {"position": c.Rotary(fraction=0.4)}),
    "two parallel branches": ("gpt_neox", {"placement": "pre"}),
    "attention scale": ("gpt_neo", {"attention__scale": None}),
    "windows in some layers": ("gpt_neo", {"attention__window_layers": None}),
    "ALiBi": ("bloom", {"position": c.NoPosition()}),
    "rounded ALiBi": ("falcon rw", {"position": c.Alibi(scale=0.5)}),
    "ALiBi scale": ("falcon rw", {"position": c.Alibi(rounded=True)}),
    "clip": ("mpt", {"attention__clip": None}),
    "clip of OLMo": ("olmo", {"attention__clip": None}),
    "residual scale": ("granite", {"residual_scale": 1.0}),
    "logit scale": ("cohere", {"head": c.Head()}),
    "layers without rotation": ("smollm3", {"layer_kinds": ()}),
    "rotation in sliding layers only": ("cohere2", {"layer_kinds": ()}),
    "squared ReLU": ("arcee", {"feedforward__activation": "relu"}),
    "q/k norm of the projection": ("olmoe", {"attention__qk_norm": c.RMSNorm(eps=0.5)}),
    "q/k norm after the rotation": ("hunyuan_v1_dense", {"attention__qk_norm_after_rotation": False}),
    "dense layers": ("qwen3_moe", {"layer_kinds": lambda kinds: change_kinds(kinds, activation="relu")}),
    "normalized weights": ("qwen2_moe", {"feedforward": lambda moe: dataclasses.replace(moe, normalize=False)}),
    "sigmoid router": ("deepseek_v3", {"feedforward": lambda moe: change_router(moe, score="softmax")}),
    "groups of experts": ("deepseek_v3", {"feedforward": lambda moe: change_router(moe, groups=1, top_groups=1)}),
    "score of a group": ("deepseek_v2", {"feedforward": lambda moe: change_router(moe, group_score="sum_of_two")}),
    "router scale": ("glm4_moe", {"feedforward": lambda moe: change_router(moe, scale=1.0)}),
    "correction": ("deepseek_v3", without_correction),
    "limit of the gate": ("gpt_oss", {"feedforward": lambda moe: change_expert(moe, limit=None)}),
    "offset of the gate": ("gpt_oss", {"feedforward": lambda moe: change_expert(moe, up_offset=0.0)}),
    "sinks": ("gpt_oss", without_sinks),
    "rotated pairs of latent attention": ("deepseek_v3", {"position": c.Rotary(fraction=6 / 16)}),
    "scale of YaRN": ("deepseek_v3, halves", {"attention__scale": None}),
}


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", CONTROLS)
@torch.no_grad()
def test_a_feature_that_is_turned_off_shows(tmp_path, name):
    case, changes = CONTROLS[name]
    model = reference(case, torch.float32)
    ours = load(saved(model, tmp_path))
    config, state = ours.config, ours.state_dict()
    if callable(changes):
        state = changes(state)
    else:
        config = c.replace(config, **{key: v(getattr(config, key)) if callable(v) else v for key, v in changes.items()})
    changed = type(ours)(config).eval()
    changed.load_state_dict(state)
    tokens, mask, _ = batch("left")
    theirs = logits_of(model, "left", torch.float32)
    largest = float(theirs.abs().max())
    assert gap(ours(tokens, mask=mask), theirs, mask) / largest <= BOUND[torch.float32]
    assert gap(changed(tokens, mask=mask), theirs, mask) / largest >= 3 * BOUND[torch.float32]


def test_every_family_is_in_the_table():
    tried = {config_of(case)[1].model_type for case in CASES}
    assert {family.name for family in DECODERS if family.needs_type} == tried
    assert [family.name for family in DECODERS if not family.needs_type] == ["GPT-2", "Llama"]  # own test files
