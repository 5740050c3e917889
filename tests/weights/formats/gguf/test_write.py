"""The parts of writing: stacked experts, tensors that have no name, the context of a model with a window."""

import dataclasses

import pytest
import torch

from glassformer.config import Attention
from glassformer.weights import WeightsError
from glassformer.weights.formats.gguf.architectures import find
from glassformer.weights.formats.gguf.write import _moves, check_quantization, describe
from tests.weights.formats.gguf.models import CASES, gpt2, llama, random


def test_experts_are_stacked_in_the_order_of_their_numbers():
    config = dataclasses.replace(
        CASES["mixtral"], feedforward=dataclasses.replace(CASES["mixtral"].feedforward, n_experts=12)
    )
    model = random(config)
    described = describe(config, model.state_dict())
    stacked = described.tensor("blk.1.ffn_up_exps.weight")
    assert stacked.shape == (12, 53, 60)
    assert all(torch.equal(stacked[j], model.blocks[1].feedforward.experts[j].up.weight) for j in range(12))


def test_queries_and_keys_have_their_own_number_of_heads():
    model = random(CASES["llama"])
    described = describe(CASES["llama"], model.state_dict())
    keys = described.tensor("blk.0.attn_k.weight")
    assert torch.equal(keys[10:14], model.blocks[0].attention.k.weight[[10, 15, 11, 16]])  # 2 heads of 10


def test_a_window_limits_the_context():
    described = describe(CASES["mistral"], random(CASES["mistral"]).state_dict())
    assert described.metadata["llama.context_length"] == 16
    assert described.config.attention.window is None
    assert "limited to 16 tokens" in described.notes[0]
    config = gpt2(attention=Attention(5, window=7))
    with pytest.raises(WeightsError, match=r"attention\.window=\[7, 7, 7\] cannot be written as GPT-2"):
        describe(config, random(config).state_dict())


def test_a_window_is_left_out_if_no_architecture_with_windows_computes_the_rest():
    """SmolLM3 has windows in some layers, but llama.cpp computes it without the scaling of Llama 3."""
    windows = Attention(6, n_kv_heads=2, bias=False, window=9, window_layers=(0, 2))
    config = llama(windows, position=CASES["llama-llama3"].position)
    described = describe(config, random(config).state_dict())
    assert described.architecture.name == "llama"
    assert described.metadata["llama.context_length"] == 9
    assert "window of 9 tokens" in described.notes[0]


def test_tensors_without_a_name_there_and_unknown_quantisations():
    state = {**random(llama()).state_dict(), "decoder.extra.weight": torch.ones(2)}
    with pytest.raises(WeightsError, match=r"does not have cannot be written as GGUF \(1: decoder.extra.weight\)"):
        _moves(find("llama"), llama(), state)
    with pytest.raises(WeightsError, match="'int4' is not known: use one of f32"):
        check_quantization("int4")
