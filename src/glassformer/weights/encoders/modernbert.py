"""ModernBERT: pre-norm without a first norm, gated feed-forward, rotary positions, windows in two of three layers."""

from dataclasses import dataclass
from typing import Any

from glassformer.config import ModelConfig
from glassformer.weights.convert import CONCATENATED
from glassformer.weights.encoders.parts import HeadNames, MaskedHead, Renamed, WithHead, names
from glassformer.weights.family import Source
from glassformer.weights.hf.layers import FULL, SLIDING, RopeByType, Windows, all_full
from glassformer.weights.hf.layouts import GATE_UP, QKV, Block
from glassformer.weights.keys import (
    INIT,
    SIZES,
    WIDTH,
    Dropout,
    Values,
    activation,
    describe,
    eps,
    flag,
    max_len,
)

HEAD = HeadNames("head.dense", "head.norm", "decoder")
BASE: dict[str, Any] = {
    "kind": "encoder",
    "norm": {"kind": "layer_norm"},
    "feedforward": {"kind": "gated"},
    "embedding": {"norm": True},
    "first_norm": False,
}
BLOCK: Block = {
    **{QKV: ("attn.Wqkv", CONCATENATED), "attention.o": "attn.Wo"},
    **{GATE_UP: ("mlp.Wi", CONCATENATED), "feedforward.down": "mlp.Wo"},
    **{"norm_attention": "attn_norm", "norm_feedforward": "mlp_norm"},
}


@dataclass(frozen=True)
class Local(Windows):
    """Windows of `local_attention` tokens, half of them on each side, next to the token itself."""

    def read(self, source: Source, values: Values) -> None:
        every = source.integer("global_attn_every_n_layers", 3)
        default = [SLIDING if i % every else FULL for i in range(values["n_layers"])]
        source.data.setdefault("layer_types", default)
        source.data["sliding_window"] = source.integer("local_attention", 128) // 2 + 1
        super().read(source, values)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        super().write(config, data)
        data["local_attention"] = 2 * (data.pop("sliding_window") - 1)


MODERNBERT = describe(
    "modernbert",
    ("ModernBertForMaskedLM", "ModernBertModel"),
    BASE,
    (
        *(*SIZES, WIDTH, INIT, activation("hidden_activation", "gelu"), max_len(8192)),
        *(eps(1e-5, "norm_eps"), flag("norm_bias", "norm.bias", False)),
        *(flag("attention_bias", "attention.bias", False), flag("mlp_bias", "feedforward.bias", False)),
        Dropout("mlp_dropout", "attention_dropout", "embedding_dropout"),
        *(Local(65, all_full), Renamed("global_rope_theta", "rope_theta")),
        RopeByType(full=160000.0, sliding=10000.0, sliding_key="local_rope_theta"),
        MaskedHead("model.", HEAD, table="embeddings.tok_embeddings.weight"),
        WithHead(activation("classifier_activation", "gelu", field="head.transform")),
        WithHead(flag("classifier_bias", "head.transform_bias", False)),
        WithHead(flag("decoder_bias", "head.bias", True)),
    ),
    names(
        BLOCK,
        HEAD,
        layers="{p}layers.{i}",
        outside={
            **{"embed.tokens": "embeddings.tok_embeddings", "encoder.embed_norm": "embeddings.norm"},
            "encoder.norm": "final_norm",
        },
        table="embeddings.tok_embeddings.weight",
    ),
    embed="embeddings.tok_embeddings.weight",
)
FAMILIES = (MODERNBERT,)
