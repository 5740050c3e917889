"""NomicBERT (nomic-embed-text): post-norm BERT with rotary positions and a gated feed-forward, biases in norms only.

The published config.json has the keys of GPT-2. transformers ignores them, and its defaults are equal; here they are
read.
"""

from typing import Any

from glassformer.weights.convert import CONCATENATED
from glassformer.weights.encoders.parts import (
    DROPOUT,
    EPS,
    IGNORED,
    POOLER,
    WORDS,
    HeadNames,
    MaskedHead,
    Pad,
    Pooler,
    ReadOnly,
    Renamed,
    names,
    segments,
)
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import QKV, Block
from glassformer.weights.keys import INIT, activation, describe, head_dim, integer, max_len, only

HEAD = HeadNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.layer_norm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
BASE: dict[str, Any] = {
    "kind": "encoder",
    "norm": {"kind": "layer_norm"},
    "attention": {"bias": False},
    "feedforward": {"kind": "gated", "bias": False},
    "embedding": {"norm": True},
    "placement": "post",
}
BLOCK: Block = {
    **{QKV: ("attn.Wqkv", CONCATENATED), "attention.o": "attn.out_proj"},
    **{"feedforward.up": "mlp.fc11", "feedforward.gate": "mlp.fc12", "feedforward.down": "mlp.fc2"},
    **{"norm_attention": "norm1", "norm_feedforward": "norm2"},
}
OTHER = "which is not implemented for this family"

NOMIC_BERT = describe(
    "nomic_bert",
    ("NomicBertForMaskedLM", "NomicBertModel"),
    BASE,
    (
        integer("vocab_size", "vocab_size"),
        integer("hidden_size", "d_model", 768, aliases=("n_embd",)),
        integer("num_hidden_layers", "n_layers", 12, aliases=("n_layer",)),
        integer("num_attention_heads", "attention.n_heads", 12, aliases=("n_head",)),
        integer("intermediate_size", "feedforward.d_ff", 3072, aliases=("n_inner",), get=lambda config: config.d_ff),
        *(INIT, EPS, head_dim(), activation("hidden_act", "silu"), DROPOUT, Pad(0)),
        *(Renamed("n_positions", "max_position_embeddings"), max_len(2048)),
        *(Renamed("rotary_emb_base", "rope_theta"), Rope(1000.0)),
        segments(),
        *(MaskedHead("nomic_bert.", HEAD), Pooler("nomic_bert.")),
        ReadOnly(only("num_experts", 0, why=f"a mixture of experts, {OTHER}")),
        ReadOnly(only("prenorm", False, why=f"norms before the branches, {OTHER}")),
        ReadOnly(only("qkv_proj_bias", False, why=f"biases of queries, keys and values, {OTHER}")),
        ReadOnly(only("rotary_emb_interleaved", False, why=f"interleaved rotation, {OTHER}")),
    ),
    names(
        BLOCK,
        HEAD,
        layers="{p}encoder.layers.{i}",
        outside={
            **{"embed.tokens": "embeddings.word_embeddings", "embed.segments": "embeddings.token_type_embeddings"},
            **{"encoder.embed_norm": "emb_ln", **POOLER},
        },
    ),
    prefix="nomic_bert.",
    embed=WORDS,
    drops=IGNORED,
)
