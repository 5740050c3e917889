"""GPT-2: pre-norm decoder, learned positions, tied head. Matrices are stored (in, out), with q, k, v concatenated."""

import dataclasses
from typing import Any

from glassformer.config import Attention, DecoderConfig, Dense, Head, LayerNorm, Learned, ModelConfig
from glassformer.weights.convert import CONV1D, Drop, Row, linear
from glassformer.weights.family import Family, Source, expect, write_activation, write_special

BLOCK, HF_BLOCK = "decoder.blocks.{i}", "{p}h.{i}"

ROWS = (
    Row("{p}wte.weight", ("embed.tokens.weight",)),
    Row("{p}wpe.weight", ("decoder.position.weight",)),
    *linear(f"{HF_BLOCK}.ln_1", f"{BLOCK}.norm_attention"),
    *linear(f"{HF_BLOCK}.attn.c_attn", *(f"{BLOCK}.attention.{x}" for x in "qkv"), transform=CONV1D),
    *linear(f"{HF_BLOCK}.attn.c_proj", f"{BLOCK}.attention.o", transform=CONV1D),
    *linear(f"{HF_BLOCK}.ln_2", f"{BLOCK}.norm_feedforward"),
    *linear(f"{HF_BLOCK}.mlp.c_fc", f"{BLOCK}.feedforward.up", transform=CONV1D),
    *linear(f"{HF_BLOCK}.mlp.c_proj", f"{BLOCK}.feedforward.down", transform=CONV1D),
    *linear("{p}ln_f", "decoder.norm"),
    Row("lm_head.weight", ("head.weight",), tied_to="{p}wte.weight"),
)

DROPS = (
    Drop("{p}h.{i}.attn.bias", "the causal mask, stored by old versions"),
    Drop("{p}h.{i}.attn.masked_bias", "the score of a masked position, stored by old versions"),
)


def read(source: Source) -> ModelConfig:
    no = "which is not implemented"
    source.only("scale_attn_by_inverse_layer_idx", False, why=f"a scale that changes with the layer, {no}")
    source.only("add_cross_attention", False, why=f"cross-attention in a decoder-only model, {no}")
    source.only("is_decoder", False, True, why="which must be true or false")
    d_model, vocab_size = source.integer("n_embd"), source.integer("vocab_size")
    prefix = source.prefix("transformer.")
    tie = source.flag("tie_word_embeddings", True)
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=source.integer("n_layer"),
        attention=Attention(
            n_heads=source.integer("n_head"), scale=None if source.flag("scale_attn_weights", True) else 1.0
        ),
        feedforward=Dense(
            d_ff=source.integer("n_inner", 4 * d_model), activation=source.activation("activation_function", "gelu_new")
        ),
        norm=LayerNorm(eps=source.number("layer_norm_epsilon", 1e-5)),
        max_len=source.integer("n_positions", 1024),
        head=source.head(prefix, "lm_head.weight", f"{prefix}wte.weight", tie),
        dropout=source.dropout("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        init_std=source.number("initializer_range", 0.02),
        special=source.special(vocab_size),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    expect(config.feedforward, Dense, "feedforward", "GPT-2")
    assert isinstance(config.feedforward, Dense)
    assert isinstance(config.position, Learned)
    return {
        "architectures": ["GPT2LMHeadModel" if config.head else "GPT2Model"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_len,
        "n_ctx": config.max_len,
        "n_embd": config.d_model,
        "n_layer": config.n_layers,
        "n_head": config.n_heads,
        "n_inner": config.d_ff,
        "activation_function": write_activation(config.feedforward.activation),
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "layer_norm_epsilon": config.norm.eps,
        "initializer_range": config.init_std,
        "scale_attn_weights": config.attention.scale != 1.0,
        "tie_word_embeddings": (config.head or Head(tied=False)).tied,
        **write_special(config.special),
    }


def add_biases(config: ModelConfig) -> ModelConfig:
    """Return the config with all biases: GPT-2 always has them, and biases of zero do not change the function."""
    if not isinstance(config.norm, LayerNorm) or not isinstance(config.feedforward, Dense):
        return config
    return dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, bias=True, out_bias=None),
        feedforward=dataclasses.replace(config.feedforward, bias=True),
        norm=dataclasses.replace(config.norm, bias=True),
    )


GPT2 = Family(
    name="GPT-2",
    types=("gpt2",),
    keys=("n_embd", "n_layer", "n_head"),
    typical_names=("wte.weight", "wpe.weight", "ln_f.weight"),
    prefix="transformer.",
    embed="wte.weight",
    rows=lambda config: ROWS,
    drops=DROPS,
    read=read,
    write=write,
    add_biases=add_biases,
)
