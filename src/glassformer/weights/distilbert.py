"""DistilBERT: BERT without segments and pooler, its own names, and the norms' eps fixed at 1e-12."""

from typing import Any

from glassformer.config import Attention, Dense, Embedding, EncoderConfig, LayerNorm, ModelConfig
from glassformer.weights.convert import Drop, Row, linear
from glassformer.weights.family import Family, Source, expect, write_activation, write_special

BLOCK, HERS = "encoder.blocks.{i}", "{p}transformer.layer.{i}"
WORDS = "{p}embeddings.word_embeddings.weight"

ROWS = (
    Row(WORDS, ("embed.tokens.weight",)),
    Row("{p}embeddings.position_embeddings.weight", ("encoder.position.weight",)),
    *linear("{p}embeddings.LayerNorm", "encoder.embed_norm"),
    *linear(f"{HERS}.attention.q_lin", f"{BLOCK}.attention.q"),
    *linear(f"{HERS}.attention.k_lin", f"{BLOCK}.attention.k"),
    *linear(f"{HERS}.attention.v_lin", f"{BLOCK}.attention.v"),
    *linear(f"{HERS}.attention.out_lin", f"{BLOCK}.attention.o"),
    *linear(f"{HERS}.sa_layer_norm", f"{BLOCK}.norm_attention"),
    *linear(f"{HERS}.ffn.lin1", f"{BLOCK}.feedforward.up"),
    *linear(f"{HERS}.ffn.lin2", f"{BLOCK}.feedforward.down"),
    *linear(f"{HERS}.output_layer_norm", f"{BLOCK}.norm_feedforward"),
    *linear("vocab_transform", "head.transform"),
    *linear("vocab_layer_norm", "head.norm"),
    Row("vocab_projector.weight", ("head.weight",), tied_to=WORDS),
    Row("vocab_projector.bias", ("head.bias",)),
)

DROPS = (Drop("{p}embeddings.position_ids", "0, 1, 2, ..., stored by old versions"),)


def read(source: Source) -> ModelConfig:
    if source.flag("sinusoidal_pos_embds", False):
        # The waves are stored as an ordinary table, and transformers reads them from it too.
        source.notes.append("sinusoidal positions are read from their stored table.")
    vocab_size = source.integer("vocab_size")
    activation = source.activation("activation", "gelu")
    prefix = source.prefix("distilbert.")
    source.data.setdefault("pad_token_id", 0)
    head = None
    if source.tensors is None or source.has("vocab_transform.weight"):
        tie = source.flag("tie_word_embeddings", True)
        parts: dict[str, Any] = {"bias": True, "transform": activation}
        head = source.head(prefix, "vocab_projector.weight", WORDS.format(p=prefix), tie, **parts)
    return EncoderConfig(
        vocab_size=vocab_size,
        d_model=source.integer("dim"),
        n_layers=source.integer("n_layers"),
        attention=Attention(n_heads=source.integer("n_heads")),
        feedforward=Dense(source.integer("hidden_dim"), activation=activation),
        norm=LayerNorm(eps=1e-12),
        placement="post",
        max_len=source.integer("max_position_embeddings", 512),
        embedding=Embedding(norm=True),
        head=head,
        dropout=source.dropout("dropout", "attention_dropout"),
        init_std=source.number("initializer_range", 0.02),
        special=source.special(vocab_size),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    expect(config.feedforward, Dense, "feedforward", "DistilBERT")
    assert isinstance(config.feedforward, Dense)
    return {
        "architectures": ["DistilBertForMaskedLM" if config.head else "DistilBertModel"],
        "model_type": "distilbert",
        "vocab_size": config.vocab_size,
        "dim": config.d_model,
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "hidden_dim": config.d_ff,
        "activation": write_activation(config.feedforward.activation),
        "dropout": config.dropout,
        "attention_dropout": config.dropout,
        "max_position_embeddings": config.max_len,
        "sinusoidal_pos_embds": False,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.head is None or config.head.tied,
        **write_special(config.special),
    }


DISTILBERT = Family(
    name="DistilBERT",
    types=("distilbert",),
    keys=("dim", "n_layers", "n_heads", "hidden_dim"),
    marks=("embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"),
    prefix="distilbert.",
    embed="embeddings.word_embeddings.weight",
    rows=lambda config: ROWS,
    drops=DROPS,
    read=read,
    write=write,
)
