"""What BART and its descendants have in common: keys of config.json, tensor names, the bias of the logits."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glassformer.config import ModelConfig
from glassformer.weights.convert import Drop, OneRow, Row, linear
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Family, Source
from glassformer.weights.keys import (
    Constant,
    Dropout,
    Entry,
    Tied,
    Values,
    activation,
    describe,
    integer,
    lookup,
    max_len,
    number,
    only,
)


@dataclass(frozen=True)
class Both:
    """A size that config.json gives for encoder and decoder, and that must be the same in both."""

    name: str
    """The key without `encoder_` or `decoder_`."""
    field: str
    default: int

    def read(self, source: Source, values: Values) -> None:
        encoder, decoder = (source.integer(f"{stack}_{self.name}", self.default) for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise WeightsError(
                f"config.json has encoder_{self.name}={encoder} and decoder_{self.name}={decoder}: only models whose "
                "encoder and decoder agree are supported."
            )
        values[self.field] = encoder

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        value = lookup(config, self.field)
        data |= {f"encoder_{self.name}": value, f"decoder_{self.name}": value}


@dataclass(frozen=True)
class Scaled:
    """The factor sqrt(D) on the token embedding."""

    default: bool

    def read(self, source: Source, values: Values) -> None:
        values["embedding.scale"] = (
            math.sqrt(values["d_model"]) if source.flag("scale_embedding", self.default) else 1.0
        )

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["scale_embedding"] = math.isclose(config.embedding.scale, math.sqrt(config.d_model), rel_tol=1e-12)


@dataclass(frozen=True)
class Ids:
    """Defaults of token ids."""

    ids: Mapping[str, int | None]
    start: str = "bos"
    """The token with which the decoder starts if config.json names no other; `bos` in generate() of transformers."""

    def read(self, source: Source, values: Values) -> None:
        for name, value in self.ids.items():
            source.data.setdefault(f"{name}_token_id", value)
        if source.generation.get("decoder_start_token_id", source.data.get("decoder_start_token_id")) is None:
            source.data["decoder_start_token_id"] = source.data.get(f"{self.start}_token_id")
            source.generation.pop("decoder_start_token_id", None)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data |= {f"{name}_token_id": None for name in self.ids}  # the config's own ids follow


@dataclass(frozen=True)
class LogitsBias(Entry):
    """The bias of the logits, `final_logits_bias`, which models without a head do not have. It comes after the head."""

    def read(self, source: Source, values: Values) -> None:
        if values.get("head", True) is not None:
            values["head.bias"] = source.tensors is None or source.has("final_logits_bias")


BLOCK = {
    **{f"attention.{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{"attention.o": "self_attn.out_proj", "norm_attention": "self_attn_layer_norm"},
    **{f"cross.{x}": f"encoder_attn.{x}_proj" for x in "qkv"},
    **{"cross.o": "encoder_attn.out_proj", "norm_cross": "encoder_attn_layer_norm"},
    **{"feedforward.up": "fc1", "feedforward.down": "fc2", "norm_feedforward": "final_layer_norm"},
}
TABLES = ("{p}encoder.embed_tokens.weight", "{p}decoder.embed_tokens.weight")
ROWS = (
    Row("{p}shared.weight", ("embed.tokens.weight",), aliases=TABLES),
    *(
        row
        for stack in ("encoder", "decoder")
        for row in (
            Row(f"{{p}}{stack}.embed_positions.weight", (f"{stack}.position.weight",)),
            *linear(f"{{p}}{stack}.layernorm_embedding", f"{stack}.embed_norm"),
            *linear(f"{{p}}{stack}.layer_norm", f"{stack}.norm"),
            *(
                part
                for ours, theirs in BLOCK.items()
                for part in linear(f"{{p}}{stack}.layers.{{i}}.{theirs}", f"{stack}.blocks.{{i}}.{ours}")
            ),
        )
    ),
    Row("lm_head.weight", ("head.weight",), tied_to="{p}shared.weight"),
    Row("final_logits_bias", ("head.bias",), OneRow()),
)
"""Every tensor of BART and its descendants. Models that lack a part ignore its row."""
DROPS = (
    *(Drop(f"{{p}}{stack}.version", "a version number, stored by old versions") for stack in ("encoder", "decoder")),
    *(
        Drop(f"classification_head.{layer}.{part}", "a classifier is not part of the model", notice=True)
        for layer in ("dense", "out_proj")
        for part in ("weight", "bias")
    ),
)


def add_bias(config: ModelConfig) -> ModelConfig:
    """Return the config with a bias of the logits, which transformers always has."""
    if config.head is None or config.head.bias:
        return config
    return dataclasses.replace(config, head=dataclasses.replace(config.head, bias=True))


def bart_like(
    type: str,
    names: str,
    base: Mapping[str, Any],
    *entries: Entry,
    scaled: bool = False,
    act: str = "gelu",
    sizes: tuple[int, int, int, int] = (1024, 12, 16, 4096),
    context: int = 1024,
    ids: Mapping[str, int | None],
    drops: tuple[Drop, ...] = (),
    bias: bool = True,
) -> Family:
    """Return a family with the keys and tensor names of BART. `names` is the prefix of its classes in transformers.

    `sizes` are the defaults of width, layers, heads and feed-forward width; `scaled` is that of `scale_embedding`.
    """
    width, layers, heads, d_ff = sizes
    common: tuple[Entry, ...] = (
        integer("vocab_size", "vocab_size"),
        integer("d_model", "d_model", width),
        integer("encoder_layers", "n_encoder_layers", layers),
        integer("decoder_layers", "n_layers", layers),
        *(Both("attention_heads", "attention.n_heads", heads), Both("ffn_dim", "feedforward.d_ff", d_ff)),
        activation("activation_function", act),
        *(Dropout("dropout", "attention_dropout"), number("init_std", "init_std", 0.02), max_len(context)),
        *(Scaled(scaled), Ids(ids), only("is_decoder", False, why="a decoder alone, which is not implemented")),
        Constant("is_encoder_decoder", True),  # the default of transformers, but other readers look for the key
        Tied("model.", "lm_head.weight", "shared.weight", default=True),
        *((LogitsBias(),) if bias else ()),
    )
    head = names if names.endswith("Model") else f"{names}ForConditionalGeneration"
    return describe(
        type,
        (head, head),
        {"kind": "seq2seq", "norm": {"kind": "layer_norm"}, "feedforward": {"kind": "dense"}, **base},
        (*common, *entries),
        ROWS,
        embed="shared.weight",
        drops=(*DROPS, *drops),
        add_biases=add_bias if bias else None,
    )
