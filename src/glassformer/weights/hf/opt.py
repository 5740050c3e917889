"""OPT and Galactica (opt), and BioGPT: learned positions with two unused rows in front, LayerNorm, biases."""

import math
from typing import Any

from glassformer.config import ModelConfig
from glassformer.weights.convert import Drop, Row
from glassformer.weights.family import Source
from glassformer.weights.hf.common import DENSE, LAYER_NORM, SAME_BIAS
from glassformer.weights.hf.layouts import names
from glassformer.weights.keys import (
    INIT,
    SIZES,
    WIDTH,
    Derived,
    Dropout,
    Tied,
    Values,
    activation,
    describe,
    flag,
    integer,
    max_len,
    number,
)

POSITION = {"position": {"kind": "learned", "offset": 2}}
BLOCK = {
    "norm_attention": "self_attn_layer_norm",
    "norm_feedforward": "final_layer_norm",
    **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{"attention.o": "self_attn.out_proj", "feedforward.up": "fc1", "feedforward.down": "fc2"},
}


class FinalNorm:
    """The final norm. Only pre-norm models have one, and transformers can leave it out."""

    def read(self, source: Source, values: Values) -> None:
        if values["placement"] == "pre":
            source.only("_remove_final_layer_norm", False, why="a pre-norm model without a final norm")

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["_remove_final_layer_norm"] = False


class Projection:
    """Token tables of another width than the model (OPT 350M): a linear layer follows them, another precedes the head.

    It comes after the head.
    """

    def read(self, source: Source, values: Values) -> None:
        width = source.integer("word_embed_proj_dim", values["d_model"])
        if width == values["d_model"]:
            return
        project = {"width": width, "project": "before_positions", "project_bias": False}
        values |= {f"embedding.{name}": value for name, value in project.items()}
        if values.get("head", True) is not None:
            values |= {"head.width": width, "head.transform_bias": False}

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["word_embed_proj_dim"] = config.embedding_width


VERSION = (Drop("{p}decoder.version", "a version number, stored by old versions"),)

OPT = describe(
    "opt",
    ("OPTForCausalLM", "OPTModel"),
    {**LAYER_NORM, **DENSE, **POSITION},
    (
        *(*SIZES, max_len(2048), activation("activation_function", "relu"), number("init_std", "init_std", 0.02)),
        integer("ffn_dim", "feedforward.d_ff", 3072, get=lambda config: config.d_ff),
        flag("do_layer_norm_before", "placement", True, "pre", "post"),
        FinalNorm(),
        flag("enable_bias", "attention.bias", True),
        SAME_BIAS,
        flag("layer_norm_elementwise_affine", "norm.weight", True),
        Derived("norm.bias", lambda values: values["norm.weight"]),
        Dropout("dropout", "attention_dropout"),
        Tied("model.", "lm_head.weight", "decoder.embed_tokens.weight", default=True),
        Projection(),
    ),
    (
        *names(
            BLOCK,
            layers="{p}decoder.layers.{i}",
            embed="decoder.embed_tokens",
            norm="decoder.final_layer_norm",
            position="decoder.embed_positions",
        ),
        Row("{p}decoder.project_in.weight", ("decoder.project.weight",)),
        Row("{p}decoder.project_out.weight", ("head.transform.weight",)),
    ),
    embed="decoder.embed_tokens.weight",
    drops=VERSION,
)
BIOGPT = describe(
    "biogpt",
    ("BioGptForCausalLM", "BioGptModel"),
    {**LAYER_NORM, **DENSE, **POSITION},
    (
        # transformers ignores layer_norm_eps and uses 1e-5, our default
        *(*SIZES, WIDTH, INIT, max_len(1024), activation("hidden_act", "gelu")),
        flag("scale_embedding", "_scaled", True, get=lambda config: config.embedding.scale != 1),
        Derived("embedding.scale", lambda values: math.sqrt(values["d_model"]) if values["_scaled"] else 1.0),
        Dropout("hidden_dropout_prob", "attention_probs_dropout_prob"),
        Tied("biogpt.", "output_projection.weight", "embed_tokens.weight", default=True),
    ),
    names(BLOCK, norm="layer_norm", head="output_projection", position="embed_positions"),
    prefix="biogpt.",
)
FAMILIES = (OPT, BIOGPT)
