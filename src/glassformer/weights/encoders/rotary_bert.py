"""Post-norm descendants of BERT with rotary positions: GTE, Jina embeddings v3 and NomicBERT.

GTE (gte-base-en-v1.5, gte-multilingual-base) has a gated feed-forward. Jina embeddings v3 is RoBERTa otherwise; the
adapters of the published files are not read. NomicBERT (nomic-embed-text) has a gated feed-forward, and biases in norms
only. Its published config.json has the keys of GPT-2. transformers ignores them, and its defaults are equal; here they
are read.
"""

from glassformer.weights.convert import CONCATENATED
from glassformer.weights.encoders.parts import (
    BASE,
    DROPOUT,
    EPS,
    GELU,
    IGNORED,
    LM_HEAD,
    WORDS,
    HeadNames,
    MaskedHead,
    Pad,
    Pooler,
    Renamed,
    names,
    segments,
)
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import QKV, Block
from glassformer.weights.keys import (
    INIT,
    SIZES,
    WIDTH,
    ReadOnly,
    activation,
    describe,
    eps,
    head_dim,
    integer,
    max_len,
    only,
)

EMBED_NORM = {"encoder.embed_norm": "emb_ln"}
NORMS = {"norm_attention": "norm1", "norm_feedforward": "norm2"}
GTE_HEAD = HeadNames("lm_head.dense", "lm_head.norm", "lm_head.decoder")
GTE_BLOCK: Block = {
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
        *(MaskedHead("gte.", GTE_HEAD, transform="gelu"), Pooler("gte.")),
    ),
    names(GTE_BLOCK, GTE_HEAD),
    prefix="gte.",
    embed=WORDS,
    drops=IGNORED,
)
JINA_BLOCK: Block = {
    **{QKV: ("mixer.Wqkv", CONCATENATED), "attention.o": "mixer.out_proj"},
    **{"feedforward.up": "mlp.fc1", "feedforward.down": "mlp.fc2", **NORMS},
}
JINA = describe(
    "jina_embeddings_v3",
    ("JinaEmbeddingsV3ForMaskedLM", "JinaEmbeddingsV3Model"),
    BASE,
    (
        *(*SIZES, WIDTH, INIT, GELU, DROPOUT, eps(1e-5, "layer_norm_eps"), Pad(1)),
        *(max_len(8194), Rope(20000.0), segments(1)),
        *(MaskedHead("roberta.", LM_HEAD, transform="gelu"), Pooler("roberta.")),
    ),
    names(JINA_BLOCK, LM_HEAD, layers="{p}encoder.layers.{i}", outside=EMBED_NORM),
    prefix="roberta.",
    embed=WORDS,
    drops=IGNORED,
)
NOMIC_HEAD = HeadNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.layer_norm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
NOMIC_BLOCK: Block = {
    **{QKV: ("attn.Wqkv", CONCATENATED), "attention.o": "attn.out_proj"},
    **{"feedforward.up": "mlp.fc11", "feedforward.gate": "mlp.fc12", "feedforward.down": "mlp.fc2", **NORMS},
}
OTHER = "which is not implemented for this family"
NOMIC_BERT = describe(
    "nomic_bert",
    ("NomicBertForMaskedLM", "NomicBertModel"),
    {**BASE, "attention": {"bias": False}, "feedforward": {"kind": "gated", "bias": False}},
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
        *(MaskedHead("nomic_bert.", NOMIC_HEAD), Pooler("nomic_bert.")),
        ReadOnly(only("num_experts", 0, why=f"a mixture of experts, {OTHER}")),
        ReadOnly(only("prenorm", False, why=f"norms before the branches, {OTHER}")),
        ReadOnly(only("qkv_proj_bias", False, why=f"biases of queries, keys and values, {OTHER}")),
        ReadOnly(only("rotary_emb_interleaved", False, why=f"interleaved rotation, {OTHER}")),
    ),
    names(NOMIC_BLOCK, NOMIC_HEAD, layers="{p}encoder.layers.{i}", outside=EMBED_NORM),
    prefix="nomic_bert.",
    embed=WORDS,
    drops=IGNORED,
)
FAMILIES = (NOMIC_BERT, GTE, JINA)
