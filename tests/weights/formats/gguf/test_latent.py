"""Latent attention in GGUF: what llama.cpp would compute otherwise is refused, and YaRN reads back as it was."""

import pytest

from glassformer.weights import WeightsError
from glassformer.weights.formats.gguf.latent import DEEPSEEK2
from glassformer.weights.formats.gguf.rope import ORIGINAL

YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, ORIGINAL: 16, "beta_fast": 8.0, "beta_slow": 1.0}
DATA = {
    **{"model_type": "deepseek_v3", "max_position_embeddings": 64, "hidden_size": 36, "num_hidden_layers": 3},
    **{"intermediate_size": 53, "num_attention_heads": 6, "rms_norm_eps": 1e-6, "head_dim": 8, "q_lora_rank": 24},
    **{"kv_lora_rank": 20, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8, "v_head_dim": 18, "n_routed_experts": 6},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "hidden_act": "silu"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 27}, "num_hidden_layers=27 with q_lora_rank=24"),
        ({"model_type": "deepseek_v2", "n_group": 2}, "n_group=2 of deepseek_v2"),
        ({"n_shared_experts": 0}, "n_shared_experts=0 cannot be written as GGUF"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"num_hidden_layers": 48, "vocab_size": 128256}, "num_hidden_layers=48 with q_lora_rank=24"),
        ({"rms_norm_eps": 1e-4}, "rms_norm_eps=0.0001 of a model with latent attention"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='linear'"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(changes, message):
    with pytest.raises(WeightsError, match=message):
        DEEPSEEK2.metadata({**DATA, **changes})


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None}, {"model_type": "deepseek_v2"}])
def test_metadata_reads_back_as_config_json(changes):
    data = {**DATA, **changes}
    back = DEEPSEEK2.config(DEEPSEEK2.metadata(data), ())
    assert {key: back[key] for key in data if key != "rope_parameters"} == {
        key: value for key, value in data.items() if key != "rope_parameters"
    }


@pytest.mark.parametrize("attention_factor", [None, 1.0, 1.3])
@pytest.mark.parametrize("weight", [0.0, 0.7, 1.0])
def test_yarn_reads_back(attention_factor, weight):
    table = {**YARN, "attention_factor": attention_factor, "mscale_all_dim": weight}
    back = DEEPSEEK2.config(DEEPSEEK2.metadata({**DATA, "rope_parameters": table}), ())["rope_parameters"]
    assert back.get("attention_factor") == pytest.approx(attention_factor)
    assert back["mscale_all_dim"] == pytest.approx(weight, abs=1e-6)
    assert back["partial_rotary_factor"] == 1.0


def test_keys_that_a_file_lacks_have_the_values_of_llama_cpp():
    """They are not the defaults of DeepSeek-V3 in transformers: 8 groups, weights normalized and multiplied by 2.5."""
    metadata = DEEPSEEK2.metadata(DATA)
    for key in ("weights_norm", "weights_scale", "group_count", "group_used_count"):
        del metadata[f"deepseek2.expert_{key}"]
    back = DEEPSEEK2.config(metadata, ())
    assert (back["norm_topk_prob"], back["routed_scaling_factor"], back["n_group"], back["topk_group"]) == (
        False,
        1,
        1,
        1,
    )
    groups = {"deepseek2.expert_group_count": 8, "deepseek2.expert_gating_func": 1}
    assert DEEPSEEK2.config(metadata | groups, ())["topk_method"] == "group_limited_greedy"


def test_files_of_old_versions_are_refused():
    metadata = DEEPSEEK2.metadata(DATA)
    del metadata["deepseek2.attention.key_length_mla"]
    with pytest.raises(WeightsError, match=r"lacks deepseek2\.attention\.key_length_mla: convert the model again"):
        DEEPSEEK2.config(metadata, ())
