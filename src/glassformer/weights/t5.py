"""T5, v1.0 and v1.1: pre-norm encoder-decoder, RMSNorm, no biases, one relative position bias table per stack, scores
not divided by sqrt(K).

v1.0 has a tied head and divides its input by sqrt(D). v1.1 has its own head, a gated feed-forward, and no division.
`tie_word_embeddings` distinguishes the two; since transformers 5, `scale_decoder_outputs` states the division alone.
"""

import math
from typing import Any

from glassformer.config import (
    Attention,
    Dense,
    EncoderConfig,
    Gated,
    Head,
    ModelConfig,
    RMSNorm,
    Seq2SeqConfig,
    T5Bias,
)
from glassformer.weights.convert import Drop, Row
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import (
    ACTIVATIONS,
    Family,
    Source,
    expect,
    read_activation,
    write_activation,
    write_special,
)


def _stack(name: str, feedforward: int) -> tuple[Row, ...]:
    """Return the rows of one stack. The feed-forward is sublayer number `feedforward` of a block."""
    block, hf_block = name + ".blocks.{i}", name + ".block.{i}.layer"
    ff, norm = f"{hf_block}.{feedforward}.DenseReluDense", f"{block}.norm_feedforward.weight"
    return (
        Row(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", (f"{name}.position.weight",)),
        *(Row(f"{hf_block}.0.SelfAttention.{x}.weight", (f"{block}.attention.{x}.weight",)) for x in "qkvo"),
        Row(f"{hf_block}.0.layer_norm.weight", (f"{block}.norm_attention.weight",)),
        Row(f"{ff}.wo.weight", (f"{block}.feedforward.down.weight",)),
        Row(f"{hf_block}.{feedforward}.layer_norm.weight", (norm,)),
        Row(f"{name}.final_layer_norm.weight", (f"{name}.norm.weight",)),
    )


def _inputs(name: str, feedforward: int, gated: bool) -> tuple[Row, ...]:
    """Return the rows of the input matrices: `wi` if dense; if gated, `wi_0` (with the activation) and `wi_1`."""
    block, hf_block = name + ".blocks.{i}.feedforward", f"{name}.block.{{i}}.layer.{feedforward}.DenseReluDense"
    if not gated:
        return (Row(f"{hf_block}.wi.weight", (f"{block}.up.weight",)),)
    return (
        Row(f"{hf_block}.wi_0.weight", (f"{block}.gate.weight",)),
        Row(f"{hf_block}.wi_1.weight", (f"{block}.up.weight",)),
    )


CROSS, HF_BLOCK = "decoder.blocks.{i}", "decoder.block.{i}.layer.1"

ROWS = (
    Row(
        "shared.weight",
        ("embed.tokens.weight",),
        aliases=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ),
    *_stack("encoder", 1),
    *_stack("decoder", 2),
    *(Row(f"{HF_BLOCK}.EncDecAttention.{x}.weight", (f"{CROSS}.cross.{x}.weight",)) for x in "qkvo"),
    Row(f"{HF_BLOCK}.layer_norm.weight", (f"{CROSS}.norm_cross.weight",)),
    Row("lm_head.weight", ("head.weight",), tied_to="shared.weight"),
)

DROPS = (
    Drop(
        "decoder.block.{i}.layer.1.EncDecAttention.relative_attention_bias.weight",
        "the position bias of cross-attention, which the model never uses",
    ),
)


def rows(config: ModelConfig) -> tuple[Row, ...]:
    gated = isinstance(config.feedforward, Gated)
    return ROWS + _inputs("encoder", 1, gated) + _inputs("decoder", 2, gated)


def _read_feedforward(source: Source) -> Dense | Gated:
    kind = source.text("feed_forward_proj", "relu")
    gate, _, name = kind.rpartition("-")
    if gate not in ("", "gated"):
        raise WeightsError(
            f"config.json has feed_forward_proj={kind!r}: use the name of an activation, or 'gated-' and the name."
        )
    if kind == "gated-gelu":
        name = "gelu_new"  # transformers reads 'gated-gelu' as the tanh approximation
    activation, d_ff = read_activation(name, "feed_forward_proj"), source.integer("d_ff")
    source.only("dense_act_fn", *ACTIVATIONS[activation], why=f"which contradicts feed_forward_proj={kind!r}")
    source.only("is_gated_act", gate == "gated", why=f"which contradicts feed_forward_proj={kind!r}")
    return Gated(d_ff, activation) if gate else Dense(d_ff, activation, bias=False)


def read(source: Source) -> ModelConfig:
    source.only("is_decoder", False, why="a decoder-only T5, which is not implemented")
    vocab_size, d_model = source.integer("vocab_size"), source.integer("d_model")
    n_heads, n_encoder = source.integer("num_heads"), source.integer("num_layers")
    parts: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": d_model,
        "attention": Attention(n_heads, d_head=source.integer("d_kv"), scale=1.0, bias=False),
        "feedforward": _read_feedforward(source),
        "norm": RMSNorm(eps=source.number("layer_norm_epsilon", 1e-6)),
        "position": T5Bias(
            source.integer("relative_attention_num_buckets"), source.integer("relative_attention_max_distance", 128)
        ),
        "dropout": source.number("dropout_rate", 0.1),
    }
    source.data.setdefault("pad_token_id", 0)
    source.data.setdefault("eos_token_id", 1)
    special = source.special(vocab_size, start=source.integer("pad_token_id"))
    if source.tensors is not None and not any(name.startswith("decoder.") for name in source.tensors):
        return EncoderConfig(n_layers=n_encoder, head=None, special=special, **parts)
    # transformers always ties unless the file contains two different tables (T5Config.__post_init__); the flag only
    # states whether the output is divided by sqrt(D).
    scaled = source.flag("scale_decoder_outputs", source.data.get("tie_word_embeddings") is not False)
    embed = "shared.weight" if source.has("shared.weight") else "encoder.embed_tokens.weight"
    head = source.head("", "lm_head.weight", embed, tie=True, scale=d_model**-0.5 if scaled else 1.0)
    return Seq2SeqConfig(
        n_layers=source.integer("num_decoder_layers", n_encoder),
        n_encoder_layers=n_encoder,
        head=head,
        special=special,
        **parts,
    )


def write(config: ModelConfig) -> dict[str, Any]:
    expect(config.position, T5Bias, "position", "T5")
    assert isinstance(config.position, T5Bias)
    expect(config.feedforward, Dense | Gated, "feedforward", "T5")
    assert isinstance(config.feedforward, Dense | Gated)
    is_seq2seq = isinstance(config, Seq2SeqConfig)
    head = config.head or Head()
    scaled = math.isclose(head.scale, config.d_model**-0.5, rel_tol=1e-12)
    name = write_activation(config.feedforward.activation)
    if isinstance(config.feedforward, Gated):
        name = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
    return {
        "architectures": ["T5ForConditionalGeneration" if is_seq2seq else "T5EncoderModel"],
        "model_type": "t5",
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "d_kv": config.d_head,
        "d_ff": config.d_ff,
        "num_layers": config.n_encoder_layers if isinstance(config, Seq2SeqConfig) else config.n_layers,
        "num_decoder_layers": config.n_layers,
        "num_heads": config.n_heads,
        "relative_attention_num_buckets": config.position.buckets,
        "relative_attention_max_distance": config.position.max_distance,
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.norm.eps,
        "feed_forward_proj": name,
        "is_encoder_decoder": is_seq2seq,
        "tie_word_embeddings": head.tied,
        "scale_decoder_outputs": scaled,
        **write_special(config.special),
    }


T5 = Family(
    name="T5",
    types=("t5",),
    keys=("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets"),
    typical_names=("encoder.final_layer_norm.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    prefix="",
    embed="shared.weight",
    rows=rows,
    drops=DROPS,
    read=read,
    write=write,
)
