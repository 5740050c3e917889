"""Metadata and config.json of an architecture: what llama.cpp assumes, what is derived, and what is missing."""

import pytest

from glassformer.weights import WeightsError
from glassformer.weights.formats.gguf.architectures import find

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def test_windows_by_layer_and_the_scale_that_llama_cpp_assumes():
    gemma2, gemma3 = find("gemma2"), find("gemma3")
    metadata = {f"gemma2.{key.gguf}": 4 for key in gemma2.keys} | {"gemma2.attention.sliding_window": 9}
    read = gemma2.config(metadata, ())
    assert read["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (read["sliding_window"], read["query_pre_attn_scalar"]) == (9, 4)
    metadata = {f"gemma3.{key.gguf}": 7 for key in gemma3.keys}
    assert gemma3.config(metadata, ())["layer_types"] == ["full_attention"] * 7
    metadata["gemma3.attention.sliding_window"] = 9
    assert [kind[:4] for kind in gemma3.config(metadata, ())["layer_types"]] == ["slid"] * 5 + ["full", "slid"]
    pattern = {"gemma3.attention.sliding_window_pattern": [False, True] * 3 + [False]}
    assert gemma3.config(metadata | pattern, ())["layer_types"][:2] == ["full_attention", "sliding_attention"]
    every = gemma3.config(metadata | {"gemma3.attention.sliding_window_pattern": 3}, ())["layer_types"]
    assert [kind[:4] for kind in every] == ["slid", "slid", "full"] * 2 + ["slid"]
    data = {key.hf: 4 for key in gemma2.keys} | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(WeightsError, match=r"query_pre_attn_scalar=13 cannot be written .* with 4 only"):
        gemma2.metadata(data | {"query_pre_attn_scalar": 13})
    with pytest.raises(WeightsError, match="attn_logit_softcapping=None cannot be written"):
        gemma2.metadata(data | {"attn_logit_softcapping": None})


def test_missing_keys_and_numbers_for_each_layer():
    llama = find("llama")
    with pytest.raises(WeightsError, match=r"lacks llama.context_length, llama.embedding_length"):
        llama.config({}, ())
    metadata = {f"llama.{key.gguf}": 2 for key in llama.keys}
    assert llama.config(metadata | {"llama.attention.head_count_kv": [2, 2]}, ())["num_key_value_heads"] == 2
    with pytest.raises(WeightsError, match="one number for all layers"):
        llama.config(metadata | {"llama.attention.head_count_kv": [2, 4]}, ())


def test_what_llama_cpp_computes_from_the_rest_and_what_config_json_does_not_have():
    """SmolLM3 has no positions in every fourth layer, OLMoE as many keys as queries; BLOOM has no context length."""
    data = {key.hf: 8 for key in find("smollm3").keys} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}
    }
    layers = [1, 1, 1, 0] * 2
    assert find("smollm3").metadata(data | {"no_rope_layers": layers})["smollm3.block_count"] == 8
    with pytest.raises(WeightsError, match=r"no_rope_layers=\[0, .*smollm3 with \[1, 1, 1, 0"):
        find("smollm3").metadata(data | {"no_rope_layers": [0, *layers[1:]]})
    metadata = {f"smollm3.{key.gguf}": 8 for key in find("smollm3").keys}
    assert find("smollm3").config(metadata, ())["no_rope_layers"] == layers
    olmoe = {key.hf: 8 for key in find("olmoe").keys} | ROPE | {"head_dim": 1}
    with pytest.raises(WeightsError, match=r"num_key_value_heads=2 cannot be written .* with 8 only"):
        find("olmoe").metadata(olmoe | {"num_key_value_heads": 2})
    bloom = find("bloom").metadata({key.hf: 8 for key in find("bloom").keys})
    assert (bloom["bloom.context_length"], bloom["bloom.feed_forward_length"]) == (2048, 32)
