"""EuroBERT: Llama as an encoder, with a plain output matrix."""

from typing import Any

from glassformer.weights.encoders.parts import HeadNames, names
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import LLAMA
from glassformer.weights.keys import (
    INIT,
    SIZES,
    WIDTH,
    Tied,
    activation,
    describe,
    eps,
    flag,
    groups,
    head_dim,
    max_len,
)

BASE: dict[str, Any] = {"kind": "encoder", "norm": {"kind": "rms_norm"}, "feedforward": {"kind": "gated"}}

EUROBERT = describe(
    "eurobert",
    ("EuroBertForMaskedLM", "EuroBertModel"),
    BASE,
    (
        *(*SIZES, WIDTH, INIT, groups(), head_dim(), max_len(8192), Rope()),
        *(eps(1e-5), activation("hidden_act", "silu")),
        *(flag("attention_bias", "attention.bias", False), flag("mlp_bias", "feedforward.bias", False)),
        Tied("model.", "lm_head.weight", "embed_tokens.weight", default=False),
    ),
    names(
        LLAMA,
        HeadNames("", "", "lm_head"),
        layers="{p}layers.{i}",
        outside={"embed.tokens": "embed_tokens", "encoder.norm": "norm"},
        table="embed_tokens.weight",
    ),
)
FAMILIES = (EUROBERT,)
