"""Jina embeddings v3: post-norm RoBERTa with rotary positions. The adapters of the published files are not read."""

from glassformer.weights.convert import CONCATENATED
from glassformer.weights.encoders.bert import LM_HEAD
from glassformer.weights.encoders.parts import (
    BASE,
    DROPOUT,
    GELU,
    IGNORED,
    POOLER,
    WORDS,
    MaskedHead,
    Pad,
    Pooler,
    names,
    segments,
)
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import QKV, Block
from glassformer.weights.keys import INIT, SIZES, WIDTH, describe, max_len, number

BLOCK: Block = {
    **{QKV: ("mixer.Wqkv", CONCATENATED), "attention.o": "mixer.out_proj"},
    **{"feedforward.up": "mlp.fc1", "feedforward.down": "mlp.fc2"},
    **{"norm_attention": "norm1", "norm_feedforward": "norm2"},
}

JINA = describe(
    "jina_embeddings_v3",
    ("JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3Model"),
    BASE,
    (
        *(*SIZES, WIDTH, INIT, GELU, DROPOUT, number("layer_norm_eps", "norm.eps", 1e-5), Pad(1)),
        *(max_len(8194), Rope(20000.0), segments(1)),
        *(MaskedHead("roberta.", LM_HEAD, transform="gelu"), Pooler("roberta.")),
    ),
    names(
        BLOCK,
        LM_HEAD,
        layers="{p}encoder.layers.{i}",
        outside={
            **{"embed.tokens": "embeddings.word_embeddings", "embed.segments": "embeddings.token_type_embeddings"},
            **{"encoder.embed_norm": "emb_ln", **POOLER},
        },
    ),
    prefix="roberta.",
    embed=WORDS,
    drops=IGNORED,
)
