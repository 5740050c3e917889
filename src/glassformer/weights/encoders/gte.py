"""GTE (gte-base-en-v1.5, gte-multilingual-base): post-norm BERT with rotary positions and a gated feed-forward."""

from glassformer.weights.convert import CONCATENATED
from glassformer.weights.encoders.parts import (
    BASE,
    DROPOUT,
    EPS,
    GELU,
    IGNORED,
    POOLER,
    WORDS,
    HeadNames,
    MaskedHead,
    Pad,
    Pooler,
    names,
)
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import QKV, Block
from glassformer.weights.keys import INIT, SIZES, WIDTH, describe, integer, max_len

HEAD = HeadNames("lm_head.dense", "lm_head.norm", "lm_head.decoder")
BLOCK: Block = {
    **{QKV: ("attention.qkv_proj", CONCATENATED), "attention.o": "attention.o_proj"},
    "feedforward.up feedforward.gate": ("mlp.up_gate_proj", CONCATENATED),
    **{"feedforward.down": "mlp.down_proj", "norm_attention": "attn_ln", "norm_feedforward": "mlp_ln"},
}

GTE = describe(
    "gte",
    ("GteForMaskedLM", "GteModel"),
    {**BASE, "feedforward": {"kind": "gated", "bias": False, "down_bias": True}},
    (
        *(*SIZES, WIDTH, INIT, GELU, DROPOUT, EPS, Pad(1), max_len(8192), Rope(160000.0)),
        integer("type_vocab_size", "embedding.n_segments", 1),
        *(MaskedHead("gte.", HEAD, transform="gelu"), Pooler("gte.")),
    ),
    names(
        BLOCK,
        HEAD,
        outside={
            **{"embed.tokens": "embeddings.word_embeddings", "embed.segments": "embeddings.token_type_embeddings"},
            **{"encoder.embed_norm": "embeddings.LayerNorm", **POOLER},
        },
    ),
    prefix="gte.",
    embed=WORDS,
    drops=IGNORED,
)
