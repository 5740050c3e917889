"""GPT-Neo: GPT-2 without the factor 1/sqrt(K), with windows in some layers."""

from typing import Any

from glassformer.config import ModelConfig
from glassformer.weights.convert import Drop
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Source
from glassformer.weights.hf.common import DENSE, INIT, LAYER_NORM, classes
from glassformer.weights.hf.layouts import names
from glassformer.weights.keys import Dropout, Tied, Values, activation, describe, eps, integer, max_len, same


class AttentionTypes:
    """`attention_types`: lists of "global" and "local" with the number of times that each is repeated."""

    def read(self, source: Source, values: Values) -> None:
        given, n = source.data.get("attention_types", [[["global", "local"], 12]]), values["n_layers"]
        try:
            kinds = [kind for pattern, times in given for _ in range(min(times, n)) for kind in pattern]
        except (TypeError, ValueError):
            kinds = []
        if len(kinds) != n or any(kind not in ("global", "local") for kind in kinds):
            raise WeightsError(
                f"config.json has attention_types={given!r}, which must name 'global' or 'local' for each of the {n} "
                "layers, as in [[['global', 'local'], 6]]."
            )
        layers = tuple(i for i, kind in enumerate(kinds) if kind == "local")
        if layers:
            values["attention.window"] = source.integer("window_size", 256)
            values["attention.window_layers"] = None if len(layers) == n else layers

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        kinds = ["local" if config.window(i) else "global" for i in range(config.n_layers)]
        data |= {
            "attention_types": [[kinds, 1]],
            "attention_layers": kinds,
            "window_size": config.attention.window or 256,
        }


GPT_NEO = describe(
    "gpt_neo",
    classes("GPTNeo"),
    {
        **LAYER_NORM,
        **DENSE,
        "attention": {"scale": 1.0, "bias": False, "out_bias": True},
        "position": {"kind": "learned"},
    },
    (
        integer("vocab_size", "vocab_size"),
        integer("hidden_size", "d_model"),
        integer("num_layers", "n_layers"),
        integer("num_heads", "attention.n_heads"),
        integer("intermediate_size", "feedforward.d_ff", lambda values: 4 * values["d_model"], null=same),
        *(INIT, max_len(2048), activation("activation_function", "gelu_new")),
        eps(1e-5, "layer_norm_epsilon"),
        AttentionTypes(),
        Dropout("resid_dropout", "embed_dropout", "attention_dropout"),
        Tied("transformer.", "lm_head.weight", "wte.weight", default=True),
    ),
    names(
        {
            **{"norm_attention": "ln_1", "norm_feedforward": "ln_2", "attention.o": "attn.attention.out_proj"},
            **{f"attention.{x}": f"attn.attention.{x}_proj" for x in "qkv"},
            **{"feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"},
        },
        **{"layers": "{p}h.{i}", "embed": "wte", "norm": "ln_f", "position": "wpe"},
    ),
    prefix="transformer.",
    embed="wte.weight",
    drops=tuple(
        Drop(f"{{p}}h.{{i}}.attn.attention.{name}", "the causal mask, stored by old versions")
        for name in ("bias", "masked_bias")
    ),
)
FAMILIES = (GPT_NEO,)
