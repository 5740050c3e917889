"""T5, v1.0 and v1.1, and mT5: pre-norm encoder-decoders, RMSNorm, no biases, scores not divided by sqrt(K), and one
table of relative position biases per stack.

v1.0 has a tied head and divides its input by sqrt(D). v1.1 has its own head, a gated feed-forward, and no division.
`tie_word_embeddings` distinguishes the two; since transformers 5, `scale_decoder_outputs` states the division alone.
mT5 is v1.1, and never divides, whatever its head is tied to.
"""

import math
from dataclasses import dataclass
from typing import Any

from glassformer.config import Dense, EncoderConfig, Gated, Head, ModelConfig, Seq2SeqConfig
from glassformer.weights.convert import Drop, Row
from glassformer.weights.errors import SAVE_AS_GLASS, WeightsError
from glassformer.weights.family import ACTIVATIONS, Family, Source, read_activation, write_activation
from glassformer.weights.keys import REQUIRED, Entry, Values, describe, eps, integer, number, only
from glassformer.weights.seq2seq.parts import Ids

BASE: dict[str, Any] = {
    "kind": "seq2seq",
    "norm": {"kind": "rms_norm"},
    "attention": {"scale": 1.0, "bias": False},
    "feedforward": {"bias": False},
    "position": {"kind": "t5_bias"},
}
ATTENTION = {f"attention.{x}": f"0.SelfAttention.{x}" for x in "qkvo"} | {"norm_attention": "0.layer_norm"}
CROSS = {f"cross.{x}": f"1.EncDecAttention.{x}" for x in "qkvo"} | {"norm_cross": "1.layer_norm"}
TABLES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
DROPS = (
    Drop(
        "decoder.block.{i}.layer.1.EncDecAttention.relative_attention_bias.weight",
        "the position bias of cross-attention, which the model never uses",
    ),
)


def rows(config: ModelConfig) -> tuple[Row, ...]:
    """Return the rows. The feed-forward is the last sublayer of a block; its input matrices are `wi`, or, if it is
    gated, `wi_0` (with the activation) and `wi_1`."""
    gated = {"feedforward.gate": "wi_0", "feedforward.up": "wi_1"}
    inputs = gated if isinstance(config.feedforward, Gated) else {"feedforward.up": "wi"}
    found = [Row("shared.weight", ("embed.tokens.weight",), aliases=TABLES)]
    for stack, sublayers, last in (("encoder", ATTENTION, 1), ("decoder", {**ATTENTION, **CROSS}, 2)):
        feedforward = {ours: f"{last}.DenseReluDense.{name}" for ours, name in inputs.items()}
        feedforward |= {"feedforward.down": f"{last}.DenseReluDense.wo", "norm_feedforward": f"{last}.layer_norm"}
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found += [Row(bias, (f"{stack}.position.weight",))]
        found += [Row(f"{stack}.final_layer_norm.weight", (f"{stack}.norm.weight",))]
        for ours, theirs in {**sublayers, **feedforward}.items():
            found += [Row(f"{stack}.block.{{i}}.layer.{theirs}.weight", (f"{stack}.blocks.{{i}}.{ours}.weight",))]
    return (*found, Row("lm_head.weight", ("head.weight",), tied_to="shared.weight"))


@dataclass(frozen=True)
class FeedForward:
    """`feed_forward_proj`: the name of an activation, or `gated-` and the name."""

    default: str

    def read(self, source: Source, values: Values) -> None:
        kind = source.text("feed_forward_proj", self.default)
        gate, _, name = kind.rpartition("-")
        if gate not in ("", "gated"):
            raise WeightsError(
                f"config.json has feed_forward_proj={kind!r}: use the name of an activation, or 'gated-' and the name."
            )
        if kind == "gated-gelu":
            name = "gelu_new"  # transformers reads 'gated-gelu' as the tanh approximation
        activation = read_activation(name, "feed_forward_proj")
        source.only("dense_act_fn", *ACTIVATIONS[activation], why=f"which contradicts feed_forward_proj={kind!r}")
        source.only("is_gated_act", gate == "gated", why=f"which contradicts feed_forward_proj={kind!r}")
        values |= {"feedforward.kind": gate or "dense", "feedforward.activation": activation}

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        part = config.feedforward
        if not isinstance(part, Dense | Gated):
            raise WeightsError(f"feedforward={type(part).__name__} cannot be written as T5: {SAVE_AS_GLASS}.")
        name = write_activation(part.activation)
        gated = "gated-gelu" if name == "gelu_new" else f"gated-{name}"
        data["feed_forward_proj"] = gated if isinstance(part, Gated) else name


@dataclass(frozen=True)
class Stacks:
    """The number of layers of encoder and decoder. A file without a decoder is an encoder without a head."""

    default: Any

    def read(self, source: Source, values: Values) -> None:
        integer("num_layers", "n_encoder_layers", self.default).read(source, values)
        values["n_layers"] = source.integer("num_decoder_layers", values["n_encoder_layers"])
        if source.tensors is not None and not any(name.startswith("decoder.") for name in source.tensors):
            values |= {"kind": "encoder", "n_layers": values.pop("n_encoder_layers"), "head": None}

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        both = isinstance(config, Seq2SeqConfig)
        data["num_layers"] = config.n_encoder_layers if isinstance(config, Seq2SeqConfig) else config.n_layers
        data |= {"num_decoder_layers": config.n_layers, "is_encoder_decoder": both}


@dataclass(frozen=True)
class OutputHead:
    """The head, and whether its input is divided by sqrt(D), which only T5 does.

    transformers always ties the head unless the file contains two different tables (T5Config.__post_init__); the flag
    only states whether the output is divided.
    """

    may_divide: bool

    def read(self, source: Source, values: Values) -> None:
        embed = "shared.weight" if source.has("shared.weight") else TABLES[0]
        values["head.tied"] = source.head("", "lm_head.weight", embed, tie=True)
        if self.may_divide and source.flag(
            "scale_decoder_outputs", source.data.get("tie_word_embeddings") is not False
        ):
            values["head.scale"] = values["d_model"] ** -0.5

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        head = config.head or Head()
        data["tie_word_embeddings"] = head.tied
        if self.may_divide:
            data["scale_decoder_outputs"] = math.isclose(head.scale, config.d_model**-0.5, rel_tol=1e-12)


def t5_like(
    type: str, names: str, layers: Any, heads: Any, buckets: Any, feedforward: str, divides: bool, **options: Any
) -> Family:
    """Return a family with the keys and tensor names of T5; the arguments are defaults of its keys."""
    entries: tuple[Entry, ...] = (
        only("is_decoder", False, why="a decoder-only T5, which is not implemented"),
        integer("vocab_size", "vocab_size"),
        integer("d_model", "d_model"),
        integer("d_kv", "attention.d_head", get=lambda config: config.d_head),
        integer("d_ff", "feedforward.d_ff", get=lambda config: config.d_ff),
        integer("num_heads", "attention.n_heads", heads),
        integer("relative_attention_num_buckets", "position.buckets", buckets),
        integer("relative_attention_max_distance", "position.max_distance", 128),
        number("dropout_rate", "dropout", 0.1),
        eps(1e-6, "layer_norm_epsilon"),
        *(FeedForward(feedforward), OutputHead(divides), Stacks(layers), Ids({"pad": 0, "eos": 1}, start="pad")),
    )
    return describe(
        type,
        (f"{names}ForConditionalGeneration", f"{names}EncoderModel"),
        BASE,
        entries,
        rows,
        prefix="",
        embed="shared.weight",
        drops=DROPS,
        typical_names=("encoder.final_layer_norm.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        kinds=(Seq2SeqConfig, EncoderConfig),
        **options,
    )


T5 = t5_like(
    *("t5", "T5", REQUIRED, REQUIRED, REQUIRED, "relu", True),
    name="T5",
    keys=("d_model", "d_kv", "d_ff", "num_layers", "num_heads", "relative_attention_num_buckets"),
)
MT5 = t5_like("mt5", "MT5", 8, 6, 32, "gated-gelu", False)
FAMILIES = (T5, MT5)
