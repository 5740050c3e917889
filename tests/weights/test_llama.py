"""Llama, Mistral, Mixtral, Qwen2 and Qwen3 folders compute here what they compute in transformers."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from glassformer.config import Head, NTKScaling, Rotary, presets
from glassformer.model import build
from glassformer.weights import WeightsError, load, load_config, save
from tests.weights.tiny import (
    BOUND,
    DTYPES,
    PADDING,
    batch,
    decoder_gap,
    edit,
    precision,
    random_model,
    reopen,
    round_trip,
    saved,
)

SIZES = {
    **{"vocab_size": 97, "hidden_size": 42, "intermediate_size": 53, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def llama(**changes):
    return hf.LlamaForCausalLM, hf.LlamaConfig(**{**SIZES, "head_dim": 10, **changes})


CASES = {
    "llama": lambda: llama(),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama-tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=6, head_dim=None, hidden_size=48),
    "mistral": lambda: (
        hf.MistralForCausalLM,
        hf.MistralConfig(**{**SIZES, "hidden_size": 41}, head_dim=10, sliding_window=4),
    ),
    "mistral-no-window": lambda: (hf.MistralForCausalLM, hf.MistralConfig(**SIZES, head_dim=10, sliding_window=None)),
    "mixtral": lambda: (
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**SIZES, head_dim=10, num_local_experts=5, num_experts_per_tok=2),
    ),
    "qwen2": lambda: (hf.Qwen2ForCausalLM, hf.Qwen2Config(**{**SIZES, "hidden_size": 60})),
    "qwen2-window": lambda: (hf.Qwen2ForCausalLM, hf.Qwen2Config(**{**SIZES, "hidden_size": 60}, **WINDOW)),
    "qwen3": lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SIZES, head_dim=10)),
    "qwen3-window-biases": lambda: (
        hf.Qwen3ForCausalLM,
        hf.Qwen3Config(**SIZES, head_dim=10, attention_bias=True, rms_norm_eps=0.1, **WINDOW),
    ),
}


@pytest.mark.sample(12)
@DTYPES
@PADDING
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path, case, dtype, side):
    model = random_model(*CASES[case](), dtype)
    assert decoder_gap(model, saved(model, tmp_path), side, dtype) <= BOUND[dtype]


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES)
def test_round_trip_gives_the_same_file_and_logits(tmp_path, case):
    model = random_model(*CASES[case]())
    round_trip(model, saved(model, tmp_path / "in"), tmp_path, lambda m: m(batch("none")[0]).logits)


@torch.no_grad()
def test_bare_model_is_read_and_written_without_a_head(tmp_path):
    model = random_model(hf.LlamaModel, llama()[1], torch.float64)
    folder = saved(model, tmp_path / "in")
    tokens = batch("none")[0]
    with precision(torch.float64):
        hidden = model(tokens).last_hidden_state
    ours = load(folder)
    assert ours.config.head is None
    assert (ours.encode(tokens) - hidden).abs().max() <= 1e-9
    model32 = random_model(hf.LlamaModel, llama()[1])
    round_trip(model32, saved(model32, tmp_path / "in32"), tmp_path, lambda m: m(tokens).last_hidden_state)


def test_bare_tied_model_gets_the_tied_head(tmp_path):
    model = random_model(hf.LlamaModel, llama(tie_word_embeddings=True)[1])
    assert load(saved(model, tmp_path)).config.head == Head(tied=True)


def test_stored_frequencies_are_dropped_and_a_stored_copy_of_the_table_is_tied(tmp_path):
    model = random_model(*llama(tie_word_embeddings=True))
    saved(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(5) for i in range(3)}
    extra["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | extra, file)
    assert load(tmp_path).config.head == Head(tied=True)


@pytest.mark.parametrize("case", ["llama", "mistral", "mixtral", "qwen2-window", "qwen3"])
def test_a_member_is_known_without_its_model_type(tmp_path, case):
    folder = saved(random_model(*CASES[case]()), tmp_path)
    config = load_config(folder)
    edit(folder, model_type=...)
    assert load_config(folder) == config


@pytest.mark.parametrize(
    ("case", "wrong"), [("llama", "qwen3"), ("qwen3", "llama"), ("qwen2", "mistral"), ("mistral", "llama")]
)
def test_a_model_type_against_the_tensors_is_refused(tmp_path, case, wrong):
    folder = saved(random_model(*CASES[case]()), tmp_path)
    edit(folder, model_type=wrong)
    with pytest.raises(WeightsError, match=wrong):
        load(folder)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama", {"pretraining_tp": 2}),
        ("llama", {"hidden_act": "mish"}),
        ("llama", {"sliding_window": 4, "use_sliding_window": False}),
        ("llama", {"attention_bias": True}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {"layer_types": ["full_attention"] * 3}),
        ("mistral", {"attention_bias": True}),
        ("qwen2-window", {"layer_types": ["sliding_attention"]}),
        ("qwen2-window", {"layer_types": ["chunked_attention"] * 3}),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}),
        ("qwen2", {"mlp_bias": True}),
    ],
    ids=str,
)
def test_what_cannot_be_represented_is_refused(tmp_path, case, changes):
    folder = saved(random_model(*CASES[case]()), tmp_path)
    edit(folder, **changes)
    with pytest.raises(WeightsError) as refused:
        load(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["llama_tiny", "moe_tiny", "qwen3_0_6b", "qwen2_0_5b", "mistral_7b"])
def test_presets_survive_the_way_out_and_back(tmp_path, name):
    small = {"d_model": 24, "n_layers": 2, "vocab_size": 31, "n_heads": 4, "n_kv_heads": 2}
    config = presets.ALL[name](**small)
    out = save(build(config, seed=1), tmp_path / "out")
    assert load(out).config.attention == config.attention
    assert load(out).config.position == config.position


@torch.no_grad()
def test_ntk_scaling_is_written_as_the_larger_base_it_is(tmp_path):
    config = presets.llama_tiny(position=Rotary(base=100.0, scaling=NTKScaling(4.0)), vocab_size=31)
    ours = build(config, seed=1).eval()
    tokens = torch.randint(31, (2, 40))
    out = save(ours, tmp_path / "out")
    assert (reopen(out)(tokens).logits - ours(tokens)).abs().max() <= 1e-4
