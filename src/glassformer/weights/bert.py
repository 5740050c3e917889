"""BERT and RoBERTa: post-norm encoders with learned positions, segments, a masked-LM head and a pooler.

They differ in the names of the head, in the positions and in the activation of the head. RoBERTa's positions start
after the padding id (at row 2 if that id is 1), and its head always uses the exact gelu. Without a head the tensors
have the same names, so `model_type` decides.
"""

import re
from typing import Any

from glassformer.config import (
    Attention,
    Dense,
    Embedding,
    EncoderConfig,
    LayerNorm,
    Learned,
    ModelConfig,
)
from glassformer.weights.convert import Drop, Row, linear
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import Family, Source, expect, write_activation, write_special

BLOCK, HF_BLOCK = "encoder.blocks.{i}", "{p}encoder.layer.{i}"

BODY = (
    Row("{p}embeddings.word_embeddings.weight", ("embed.tokens.weight",)),
    Row("{p}embeddings.token_type_embeddings.weight", ("embed.segments.weight",)),
    Row("{p}embeddings.position_embeddings.weight", ("encoder.position.weight",)),
    *linear("{p}embeddings.LayerNorm", "encoder.embed_norm"),
    *linear(f"{HF_BLOCK}.attention.self.query", f"{BLOCK}.attention.q"),
    *linear(f"{HF_BLOCK}.attention.self.key", f"{BLOCK}.attention.k"),
    *linear(f"{HF_BLOCK}.attention.self.value", f"{BLOCK}.attention.v"),
    *linear(f"{HF_BLOCK}.attention.output.dense", f"{BLOCK}.attention.o"),
    *linear(f"{HF_BLOCK}.attention.output.LayerNorm", f"{BLOCK}.norm_attention"),
    *linear(f"{HF_BLOCK}.intermediate.dense", f"{BLOCK}.feedforward.up"),
    *linear(f"{HF_BLOCK}.output.dense", f"{BLOCK}.feedforward.down"),
    *linear(f"{HF_BLOCK}.output.LayerNorm", f"{BLOCK}.norm_feedforward"),
    *linear("{p}pooler.dense", "pooler"),
)
TOKEN_TABLE = "{p}embeddings.word_embeddings.weight"

DROPS = (
    Drop("{p}embeddings.position_ids", "0, 1, 2, ..., stored by old versions"),
    Drop("cls.seq_relationship.weight", "the next-sentence classifier is not part of the model", notice=True),
    Drop("cls.seq_relationship.bias", "the next-sentence classifier is not part of the model", notice=True),
)


def _head_rows(dense: str, norm: str, root: str, tied: bool) -> tuple[Row, ...]:
    """Return the rows of the masked-LM head.

    Its bias is stored under two names. In a tied model they are one parameter; in an untied model only `decoder.bias`
    is used.
    """
    outer, inner = f"{root}.bias", f"{root}.decoder.bias"
    return (
        *linear(dense, "head.transform"),
        *linear(norm, "head.norm"),
        Row(f"{root}.decoder.weight", ("head.weight",), tied_to=TOKEN_TABLE),
        Row(outer, ("head.bias",), aliases=(inner,))
        if tied
        else Row(inner, ("head.bias",), aliases=(outer,), strict=False),
    )


def bert_rows(config: ModelConfig) -> tuple[Row, ...]:
    root = "cls.predictions"
    return BODY + _head_rows(f"{root}.transform.dense", f"{root}.transform.LayerNorm", root, _tied(config))


def roberta_rows(config: ModelConfig) -> tuple[Row, ...]:
    return BODY + _head_rows("lm_head.dense", "lm_head.layer_norm", "lm_head", _tied(config))


def _tied(config: ModelConfig) -> bool:
    return config.head is None or config.head.tied


def update_name(name: str) -> str:
    """Return today's name of a tensor: checkpoints from before 2019 call weight and bias of a norm gamma and beta."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_GREEK[m[1]]}", name)


_GREEK = {"gamma": "weight", "beta": "bias"}


def _read(source: Source, prefix: str, transform: str, root: str, offset: int, pad: int) -> ModelConfig:
    no = "which is not implemented"
    source.only("position_embedding_type", "absolute", why=f"positions inside attention, {no}")
    source.only("is_decoder", False, why=f"a causal BERT, {no}")
    source.only("add_cross_attention", False, why=f"cross-attention, {no}")
    vocab_size, d_model = source.integer("vocab_size"), source.integer("hidden_size")
    activation = source.activation("hidden_act", "gelu")
    prefix = source.prefix(prefix)
    source.data.setdefault("pad_token_id", pad)
    head = None
    if source.tensors is None or source.has(transform):
        parts: dict[str, Any] = {"bias": True, "transform": "gelu" if offset else activation}
        tie = source.flag("tie_word_embeddings", True)
        head = source.head(prefix, f"{root}.decoder.weight", TOKEN_TABLE.format(p=prefix), tie, **parts)
    return EncoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=source.integer("num_hidden_layers"),
        attention=Attention(n_heads=source.integer("num_attention_heads")),
        feedforward=Dense(source.integer("intermediate_size"), activation=activation),
        norm=LayerNorm(eps=source.number("layer_norm_eps", 1e-12)),
        position=Learned(offset=offset),
        placement="post",
        max_len=source.integer("max_position_embeddings", 512) - offset,
        embedding=Embedding(n_segments=source.integer("type_vocab_size", 2), norm=True),
        head=head,
        pooler=source.has(f"{prefix}pooler.dense.weight"),
        dropout=source.dropout("hidden_dropout_prob", "attention_probs_dropout_prob"),
        init_std=source.number("initializer_range", 0.02),
        special=source.special(vocab_size),
    )


def read_bert(source: Source) -> ModelConfig:
    return _read(source, "bert.", "cls.predictions.transform.dense.weight", "cls.predictions", offset=0, pad=0)


def read_roberta(source: Source) -> ModelConfig:
    pad = source.integer("pad_token_id", 1)
    return _read(source, "roberta.", "lm_head.dense.weight", "lm_head", offset=pad + 1, pad=1)


def write_bert(config: ModelConfig) -> dict[str, Any]:
    expect(config.feedforward, Dense, "feedforward", "BERT")
    assert isinstance(config.feedforward, Dense)
    return {
        "architectures": ["BertForMaskedLM" if config.head else "BertModel"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "intermediate_size": config.d_ff,
        "hidden_act": write_activation(config.feedforward.activation),
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "max_position_embeddings": config.max_len,
        "type_vocab_size": config.embedding.n_segments,
        "initializer_range": config.init_std,
        "layer_norm_eps": config.norm.eps,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": _tied(config),
        **write_special(config.special),
    }


def write_roberta(config: ModelConfig) -> dict[str, Any]:
    assert isinstance(config.position, Learned)
    assert config.max_len is not None
    offset, pad = config.position.offset, config.special.pad
    if pad not in (None, offset - 1):
        raise WeightsError(
            f"special.pad={pad} cannot be written with position.offset={offset}: RoBERTa's positions start at the "
            f"padding id plus 1, so set special.pad={offset - 1}, or {SAVE_AS_GLASS}."
        )
    return {
        **write_bert(config),
        "architectures": ["RobertaForMaskedLM" if config.head else "RobertaModel"],
        "model_type": "roberta",
        "max_position_embeddings": config.max_len + offset,
        "pad_token_id": offset - 1,
    }


_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "type_vocab_size")
_TYPICAL_NAMES = ("embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight")

BERT = Family(
    name="BERT",
    types=("bert",),
    keys=_KEYS,
    typical_names=_TYPICAL_NAMES,
    prefix="bert.",
    embed=_TYPICAL_NAMES[0],
    rows=bert_rows,
    drops=DROPS,
    read=read_bert,
    write=write_bert,
    excluded_prefixes=("roberta.", "lm_head."),
    update_name=update_name,
)

ROBERTA = Family(
    name="RoBERTa",
    types=("roberta", "xlm-roberta", "camembert"),
    keys=_KEYS,
    typical_names=_TYPICAL_NAMES,
    prefix="roberta.",
    embed=_TYPICAL_NAMES[0],
    rows=roberta_rows,
    drops=DROPS[:1],
    read=read_roberta,
    write=write_roberta,
    excluded_prefixes=("bert.", "cls."),
    update_name=update_name,
)
