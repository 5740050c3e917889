"""BLOOM and MPT: ALiBi positions."""

from glassformer.config import ModelConfig
from glassformer.weights.convert import CONCATENATED, PerHead, Row
from glassformer.weights.hf.common import INIT, LAYER_NORM, classes
from glassformer.weights.hf.layouts import QKV, names
from glassformer.weights.keys import (
    Constant,
    Derived,
    Dropout,
    Nested,
    SameAs,
    Tied,
    describe,
    eps,
    integer,
    max_len,
    number,
    only,
)

BLOOM_NAMES = {
    **{"norm_attention": "input_layernorm", "norm_feedforward": "post_attention_layernorm"},
    **{"attention.o": "self_attention.dense"},
    **{"feedforward.up": "mlp.dense_h_to_4h", "feedforward.down": "mlp.dense_4h_to_h"},
}


def bloom_rows(config: ModelConfig) -> tuple[Row, ...]:
    fused = {QKV: ("self_attention.query_key_value", PerHead(config.n_heads))}
    ends = {"embed": "word_embeddings", "norm": "ln_f", "embed_norm": "word_embeddings_layernorm"}
    return names({**BLOOM_NAMES, **fused}, layers="{p}h.{i}", **ends)


BLOOM = describe(
    "bloom",
    classes("Bloom"),
    {**LAYER_NORM, "feedforward": {"kind": "dense", "activation": "gelu_tanh"}, "position": {"kind": "alibi"}}
    | {"embedding": {"norm": True}},
    (
        integer("vocab_size", "vocab_size"),
        integer("hidden_size", "d_model", aliases=("n_embed",)),
        integer("n_layer", "n_layers", aliases=("num_hidden_layers",)),
        integer("n_head", "attention.n_heads", aliases=("num_attention_heads",)),
        Derived("feedforward.d_ff", lambda values: 4 * values["d_model"]),
        *(INIT, eps(1e-5, "layer_norm_epsilon")),
        only("apply_residual_connection_post_layernorm", False, why="residual connections around the norm"),
        Dropout("hidden_dropout", "attention_dropout"),
        Tied("transformer.", "lm_head.weight", "word_embeddings.weight", default=True),
    ),
    bloom_rows,
    prefix="transformer.",
    embed="word_embeddings.weight",
)

_NO = "which transformers ignores"
MPT = describe(
    "mpt",
    classes("Mpt"),
    {
        "norm": {"kind": "layer_norm", "bias": False},
        "feedforward": {"kind": "dense", "activation": "gelu", "bias": False},
    }
    | {"attention": {"bias": False}, "position": {"kind": "alibi"}},
    (
        integer("vocab_size", "vocab_size"),
        integer("d_model", "d_model"),
        integer("n_layers", "n_layers"),
        integer("n_heads", "attention.n_heads"),
        *(INIT, max_len(2048, "max_seq_len"), eps(1e-5, "layer_norm_epsilon")),
        SameAs("expansion_ratio", "_ratio", "another width of the feed-forward than 4 D", default=4),
        Derived("feedforward.d_ff", lambda values: 4 * values["d_model"]),
        Nested(
            "attn_config",
            number("clip_qkv", "attention.clip", None),
            number("softmax_scale", "attention.scale", None),
            only("alibi", True, why=_NO),
            only("alibi_bias_max", 8, why=_NO),
            *(only(name, False, why=_NO) for name in ("qk_ln", "prefix_lm", "attn_uses_sequence_id")),
        ),
        only("no_bias", True, why=_NO),
        only("logit_scale", None, why=_NO),
        Constant("learned_pos_emb", False),
        Tied("transformer.", "lm_head.weight", "wte.weight", default=True),
    ),
    names(
        {
            **{"norm_attention": "norm_1", "norm_feedforward": "norm_2", "attention.o": "attn.out_proj"},
            QKV: ("attn.Wqkv", CONCATENATED),
            **{"feedforward.up": "ffn.up_proj", "feedforward.down": "ffn.down_proj"},
        },
        **{"layers": "{p}blocks.{i}", "embed": "wte", "norm": "norm_f"},
    ),
    prefix="transformer.",
    embed="wte.weight",
)
FAMILIES = (BLOOM, MPT)
