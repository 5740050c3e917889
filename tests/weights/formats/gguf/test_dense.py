"""Dense architectures: what llama.cpp cannot load, or computes otherwise, is refused, also if it is not installed."""

import dataclasses

import pytest

from glassformer.config import Attention, Head, LayerKind, LayerNorm, Llama3Scaling, Rotary, YarnScaling
from glassformer.weights import WeightsError
from glassformer.weights.formats.gguf.write import describe
from tests.weights.formats.gguf import models
from tests.weights.formats.gguf.models import CASES, random

LLAMA3 = Rotary(base=500.0, scaling=Llama3Scaling(8.0, 32))
OLMO2 = CASES["olmo2"].attention
HALF_WINDOWED = dataclasses.replace(OLMO2, window=4, window_layers=(0, 1))


def wider(case):
    return dataclasses.replace(CASES[case], attention=dataclasses.replace(CASES[case].attention, d_head=14))


CONFIGS = {
    "qwen3, scaled as Llama 3": (
        dataclasses.replace(CASES["qwen3"], position=LLAMA3),
        "rope_type='llama3' cannot be written as GGUF: llama.cpp computes the architecture qwen3 without this scaling",
    ),
    "gpt-neox, tied": (dataclasses.replace(CASES["gptneox"], head=Head()), "tie_word_embeddings=True"),
    "olmo2, tied": (dataclasses.replace(CASES["olmo2"], head=Head()), "tie_word_embeddings=True"),
    "olmoe, tied": (dataclasses.replace(CASES["olmoe"], head=Head()), "tie_word_embeddings=True"),
    **{
        f"{case}, wide heads": (wider(case), "head_dim=14 cannot be written .* with 10 only")
        for case in ("olmo", "olmo2", "olmoe", "command-r", "exaone4")
    },
    "starcoder2, wide heads": (wider("starcoder2"), "cannot be written as GGUF"),  # jais2 refuses it first
    "glm, wide heads": (
        models.llama(Attention(6, 2, d_head=12, bias=True, out_bias=False), position=Rotary(pairing="interleaved")),
        "head_dim=12 cannot be written as GGUF: llama.cpp computes the architecture chatglm with 10 only",
    ),
    "nemotron, wide heads": (
        models.llama(
            Attention(6, 2, d_head=12, bias=False),
            feedforward=CASES["arcee"].feedforward,
            norm=LayerNorm(eps=1e-5, offset=1.0),
            position=Rotary(fraction=0.5),
        ),
        "head_dim=12 cannot be written as GGUF: llama.cpp computes the architecture nemotron with 10 only",
    ),
    "gemma2, no windows": (
        dataclasses.replace(
            CASES["gemma2"], attention=dataclasses.replace(CASES["gemma2"].attention, window=None, window_layers=None)
        ),
        "layer_types without 'sliding_attention'",
    ),
    "gemma3, a factor of YaRN": (
        dataclasses.replace(
            CASES["gemma3"], position=Rotary(base=1e6, scaling=YarnScaling(4.0, 16, attention_factor=1.3))
        ),
        "attention_factor=1.3 of YaRN",
    ),
    "olmo3, two bases": (
        dataclasses.replace(
            CASES["olmo2"], attention=HALF_WINDOWED, layer_kinds=(LayerKind((0, 1), position=Rotary(base=77.0)),)
        ),
        r"rope_theta=77.0 of layers with a window .* with 500.0, that of the other layers",
    ),
    "olmo3, scaled windows": (
        dataclasses.replace(
            CASES["olmo2"],
            attention=HALF_WINDOWED,
            layer_kinds=(LayerKind((0, 1), position=Rotary(base=500.0, scaling=YarnScaling(4.0, 16))),),
        ),
        "rope_type='yarn' of layers with a window",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_by_name(case):
    config, message = CONFIGS[case]
    with pytest.raises(WeightsError, match=message):
        describe(config, random(config).state_dict())
