"""GPT-2: pre-norm decoder, learned positions, tied head. Matrices are stored (in, out), with q, k, v concatenated."""

import dataclasses

from glassformer.config import Dense, LayerNorm, ModelConfig
from glassformer.weights.convert import CONV1D, Drop
from glassformer.weights.hf.common import DENSE, LAYER_NORM
from glassformer.weights.hf.layouts import QKV, names
from glassformer.weights.hf.neox import GPT2_SIZES
from glassformer.weights.keys import Constant, Dropout, Tied, activation, describe, flag, max_len, only

NO = "which is not implemented"


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


GPT2 = describe(
    "gpt2",
    ("GPT2LMHeadModel", "GPT2Model"),
    {**LAYER_NORM, **DENSE, "position": {"kind": "learned"}},
    (
        *(*GPT2_SIZES, max_len(1024, "n_positions"), activation("activation_function", "gelu_new")),
        Constant("n_ctx", lambda config: config.max_len),
        flag("scale_attn_weights", "attention.scale", True, None, 1.0),
        Dropout("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        Tied("transformer.", "lm_head.weight", "wte.weight", default=True),
        only("scale_attn_by_inverse_layer_idx", False, why=f"a scale that changes with the layer, {NO}"),
        only("add_cross_attention", False, why=f"cross-attention in a decoder-only model, {NO}"),
        only("is_decoder", False, True, why="which must be true or false"),
    ),
    names(
        {
            **{"norm_attention": "ln_1", "norm_feedforward": "ln_2", QKV: ("attn.c_attn", CONV1D)},
            **{"attention.o": ("attn.c_proj", CONV1D)},
            **{"feedforward.up": ("mlp.c_fc", CONV1D), "feedforward.down": ("mlp.c_proj", CONV1D)},
        },
        layers="{p}h.{i}",
        embed="wte",
        norm="ln_f",
        position="wpe",
    ),
    prefix="transformer.",
    embed="wte.weight",
    drops=(
        Drop("{p}h.{i}.attn.bias", "the causal mask, stored by old versions"),
        Drop("{p}h.{i}.attn.masked_bias", "the score of a masked position, stored by old versions"),
    ),
    name="GPT-2",
    keys=("n_embd", "n_layer", "n_head"),
    typical_names=("wte.weight", "wpe.weight", "ln_f.weight"),
    add_biases=add_biases,
)
FAMILIES = (GPT2,)
