"""DistilBERT: BERT without segments and pooler, with its own tensor names, and eps of the norms fixed at 1e-12."""

from typing import Any

from glassformer.config import Attention, Dense, Embedding, EncoderConfig, LayerNorm, ModelConfig
from glassformer.weights.convert import Drop, Row, linear
from glassformer.weights.family import Family, Source, expect, write_activation, write_special

BLOCK, HF_BLOCK = "encoder.blocks.{i}", "{p}transformer.layer.{i}"
TOKEN_TABLE = "{p}embeddings.word_embeddings.weight"

ROWS = (
    Row(TOKEN_TABLE, ("embed.tokens.weight",)),
    Row("{p}embeddings.position_embeddings.weight", ("encoder.position.weight",)),
    *linear("{p}embeddings.LayerNorm", "encoder.embed_norm"),
    *linear(f"{HF_BLOCK}.attention.q_lin", f"{BLOCK}.attention.q"),
    *linear(f"{HF_BLOCK}.attention.k_lin", f"{BLOCK}.attention.k"),
    *linear(f"{HF_BLOCK}.attention.v_lin", f"{BLOCK}.attention.v"),
    *linear(f"{HF_BLOCK}.attention.out_lin", f"{BLOCK}.attention.o"),
    *linear(f"{HF_BLOCK}.sa_layer_norm", f"{BLOCK}.norm_attention"),
    *linear(f"{HF_BLOCK}.ffn.lin1", f"{BLOCK}.feedforward.up"),
    *linear(f"{HF_BLOCK}.ffn.lin2", f"{BLOCK}.feedforward.down"),
    *linear(f"{HF_BLOCK}.output_layer_norm", f"{BLOCK}.norm_feedforward"),
    *linear("vocab_transform", "head.transform"),
    *linear("vocab_layer_norm", "head.norm"),
    Row("vocab_projector.weight", ("head.weight",), tied_to=TOKEN_TABLE),
    Row("vocab_projector.bias", ("head.bias",)),
)

DROPS = (Drop("{p}embeddings.position_ids", "0, 1, 2, ..., stored by old versions"),)


def read(source: Source) -> ModelConfig:
    if source.flag("sinusoidal_pos_embds", False):
        # The sinusoids are stored as an ordinary table, from which transformers reads them too.
        source.notes.append("sinusoidal positions are read from the table stored in the weights.")
    vocab_size = source.integer("vocab_size")
    activation = source.activation("activation", "gelu")
    prefix = source.prefix("distilbert.")
    source.data.setdefault("pad_token_id", 0)
    head = None
    if source.tensors is None or source.has("vocab_transform.weight"):
        tie = source.flag("tie_word_embeddings", True)
        parts: dict[str, Any] = {"bias": True, "transform": activation}
        head = source.head(prefix, "vocab_projector.weight", TOKEN_TABLE.format(p=prefix), tie, **parts)
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
    typical_names=("embeddings.word_embeddings.weight", "embeddings.position_embeddings.weight"),
    prefix="distilbert.",
    embed="embeddings.word_embeddings.weight",
    rows=lambda config: ROWS,
    drops=DROPS,
    read=read,
    write=write,
)
