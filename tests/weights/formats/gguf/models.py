"""Tiny random models of every architecture that is written as GGUF, and tokenizers for them."""

import dataclasses

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from glassformer.config import (
    Alibi,
    Attention,
    DecoderConfig,
    Dense,
    Embedding,
    Gated,
    Head,
    LayerKind,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    MoE,
    NoPosition,
    NTKScaling,
    RMSNorm,
    Rotary,
    Special,
    YarnScaling,
)
from glassformer.model import build
from glassformer.weights.formats.gguf.llama import is_installed

NEEDS_LLAMA = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")
V = 97


def llama(attention=None, **changes):
    parts = {
        "vocab_size": V,
        "d_model": 60,
        "n_layers": 3,
        "attention": attention or Attention(6, n_kv_heads=2, bias=False),
        "feedforward": Gated(53),
        "norm": RMSNorm(eps=1e-5),
        "position": Rotary(base=500.0),
        "max_len": 64,
        "head": Head(tied=False),
        "special": Special(bos=1, eos=(2,)),
    }
    return DecoderConfig(**{**parts, **changes})


def gpt2(**changes):
    parts = {"vocab_size": V, "d_model": 35, "n_layers": 3, "attention": Attention(5), "feedforward": Dense(53)}
    parts |= {"norm": LayerNorm(eps=1e-3), "position": Learned(), "max_len": 40}
    return DecoderConfig(**{**parts, **changes})


def gemma(attention=None, **changes):
    parts = {
        "d_model": 36,
        "attention": attention or Attention(4, n_kv_heads=2, d_head=10, bias=False),
        "feedforward": Gated(53, activation="gelu_tanh"),
        "norm": RMSNorm(eps=1e-6, offset=1.0),
        "position": Rotary(),
        "embedding": Embedding(scale=6.0),
        "head": Head(),
    }
    return llama(**{**parts, **changes})


LAYERED = {"feedforward": Dense(53, activation="gelu"), "norm": LayerNorm(eps=1e-5)}
CASES = {
    "gpt2": gpt2(),
    "gpt2-untied-no-biases": gpt2(
        head=Head(tied=False), attention=Attention(5, bias=False), feedforward=Dense(53, bias=False)
    ),
    "llama": llama(),
    "llama-tied-biases": llama(
        Attention(6, n_kv_heads=3, bias=True), feedforward=Gated(53, bias=True), head=Head(tied=True)
    ),
    "llama-linear": llama(position=Rotary(base=500.0, scaling=LinearScaling(3.0))),
    "llama-ntk": llama(position=Rotary(base=500.0, scaling=NTKScaling(3.0))),
    "llama-llama3": llama(position=Rotary(base=500.0, scaling=Llama3Scaling(8.0, 32))),
    "llama-yarn": llama(position=Rotary(base=500.0, scaling=YarnScaling(4.0, 16, beta_fast=8.0, attention_factor=1.3))),
    "mistral": llama(Attention(6, n_kv_heads=2, d_head=8, bias=False, window=16), d_model=41),
    "mixtral": llama(feedforward=MoE(5, 2, Gated(53))),
    "qwen2": llama(Attention(6, n_kv_heads=2, bias=True, out_bias=False)),
    "qwen3": llama(
        Attention(6, n_kv_heads=2, d_head=14, bias=False, qk_norm=RMSNorm(eps=1e-5)), norm=RMSNorm(eps=1e-5)
    ),
    "qwen3moe": llama(
        Attention(6, n_kv_heads=2, d_head=14, bias=False, qk_norm=RMSNorm(eps=1e-5)), feedforward=MoE(5, 2, Gated(53))
    ),
    "olmo2": llama(
        Attention(6, n_kv_heads=2, bias=False, qk_norm=RMSNorm(eps=1e-5), qk_norm_over="all"), placement="after"
    ),
    "gemma": gemma(),
    "gemma2": gemma(
        Attention(4, 2, d_head=10, bias=False, scale=10**-0.5, softcap=5.0, window=4, window_layers=(0, 2)),
        placement="sandwich",
        head=Head(softcap=8.0),
    ),
    "gemma3": gemma(
        Attention(
            **{"n_heads": 4, "n_kv_heads": 2, "d_head": 10, "bias": False, "scale": 10**-0.5, "window": 4},
            **{"qk_norm": RMSNorm(eps=1e-6, offset=1.0), "window_layers": (0, 1, 2, 3, 4, 6)},
        ),
        placement="sandwich",
        n_layers=7,
        position=Rotary(base=1e6),
        layer_kinds=(LayerKind((0, 1, 2, 3, 4, 6), position=Rotary(base=10000.0)),),
    ),
    "phi3": llama(Attention(6, bias=False), position=Rotary(base=500.0, fraction=0.6)),
    "stablelm": llama(
        Attention(6, n_kv_heads=2, bias=True, out_bias=False),
        norm=LayerNorm(eps=1e-5),
        position=Rotary(base=500.0, fraction=0.4),
    ),
    "stablelm-12b": llama(
        Attention(6, n_kv_heads=2, bias=False, qk_norm=LayerNorm(eps=1e-5, bias=False), qk_norm_over="heads"),
        norm=LayerNorm(eps=1e-5),
        position=Rotary(base=500.0, fraction=0.4),
        placement="parallel",
    ),
    "gptneox": llama(Attention(6), **LAYERED, position=Rotary(fraction=0.4), placement="parallel_two"),
    "gptneox-pre": llama(Attention(6), **LAYERED, position=Rotary(fraction=0.4)),
    "bloom": llama(
        Attention(6),
        feedforward=Dense(240),
        norm=LayerNorm(eps=1e-5),
        position=Alibi(),
        embedding=Embedding(norm=True),
        head=Head(tied=True),
        max_len=None,
    ),
    "starcoder2": llama(Attention(6, 2), feedforward=Dense(53), norm=LayerNorm(eps=1e-5)),
    "phi2": llama(
        Attention(6, 2),
        feedforward=Dense(53),
        norm=LayerNorm(eps=1e-5),
        position=Rotary(fraction=0.6),
        placement="parallel",
        head=Head(tied=False, bias=True),
    ),
    "granite": llama(
        Attention(6, 2, bias=False, scale=0.2),
        embedding=Embedding(scale=3.0),
        residual_scale=0.4,
        head=Head(tied=False, scale=0.5),
    ),
    "olmo": llama(Attention(6, 2, bias=False, clip=0.7), norm=LayerNorm(eps=1e-5, weight=False, bias=False)),
    "olmoe": llama(
        Attention(6, bias=False, qk_norm=RMSNorm(eps=1e-5), qk_norm_over="all"),
        feedforward=MoE(5, 2, Gated(53), normalize=False),
    ),
    "command-r": llama(
        Attention(6, 2, bias=False),
        norm=LayerNorm(eps=1e-5, bias=False),
        placement="parallel",
        position=Rotary(pairing="interleaved"),
        head=Head(scale=0.3),
    ),
    "smollm3": llama(n_layers=5, layer_kinds=(LayerKind((3,), position=NoPosition()),)),
    "arcee": llama(feedforward=Dense(53, activation="relu2", bias=False)),
    "seed_oss": llama(Attention(6, n_kv_heads=2, d_head=8, bias=True, out_bias=False)),
    "ernie4_5": llama(Attention(6, n_kv_heads=2, d_head=8, bias=False), position=Rotary(pairing="interleaved")),
    "glm4": llama(
        Attention(6, n_kv_heads=2, d_head=12, bias=True, out_bias=False),
        placement="sandwich",
        position=Rotary(fraction=0.5, pairing="interleaved"),
    ),
    "exaone4": llama(Attention(6, n_kv_heads=2, bias=False, qk_norm=RMSNorm(eps=1e-5)), placement="after"),
}


def random(config, seed=0, dtype=torch.float32):
    """A model with noise in every parameter, so that a bias or a norm that is forgotten shows."""
    model = build(config, seed=seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            width = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
            noise = width * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + 1 if parameter.dim() == 1 and name.endswith("weight") else noise)
    return model.to(dtype)


def wide(**changes):
    """A Llama whose rows have blocks of 32, as quantised types need."""
    return dataclasses.replace(llama(d_model=96, feedforward=Gated(64)), **changes)


def bpe(size=V, specials=("<s>", "</s>")):
    """A byte-level BPE of 256 bytes and a few merges, as GPT-2 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    text = "the cat sat on the mat, and the dogs don't think that they're there: 12345 67890 times! \n\n" * 3
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer
