"""GPT-2 and relatives with its tensor names: GPT-Neo, StarCoder 1 (gpt_bigcode), GPT-J and CodeGen.

GPT-2 is a pre-norm decoder with learned positions and a tied head. Its matrices are stored (in, out), with q, k and v
concatenated. GPT-Neo has no factor 1/sqrt(K), and windows in some layers. StarCoder 1 has one key/value head. GPT-J and
CodeGen have parallel branches with one norm, and rotary positions.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from glassformer.config import Dense, LayerNorm, ModelConfig, Rotary
from glassformer.weights.convert import CONV1D, Drop, PerHead, Shape, Transform
from glassformer.weights.errors import WeightsError
from glassformer.weights.family import Family, Source
from glassformer.weights.hf.common import DENSE, LAYER_NORM, classes
from glassformer.weights.hf.layouts import QKV, Block, names
from glassformer.weights.keys import (
    INIT,
    Constant,
    Dropout,
    Entry,
    Tied,
    Values,
    activation,
    describe,
    eps,
    flag,
    integer,
    max_len,
    only,
    same,
)

NO = "which is not implemented"
LEARNED: dict[str, Any] = {"position": {"kind": "learned"}}
NORMS = {"norm_attention": "ln_1", "norm_feedforward": "ln_2"}
MLP = {"feedforward.up": "mlp.c_fc", "feedforward.down": "mlp.c_proj"}
ENDS = {"layers": "{p}h.{i}", "embed": "wte", "norm": "ln_f", "position": "wpe"}
MASKS = tuple(
    Drop(f"{{p}}h.{{i}}.attn.{name}", "the causal mask, stored by old versions")
    for name in ("bias", "masked_bias", "causal_mask", "attention.bias", "attention.masked_bias")
)
SIZES = (
    integer("vocab_size", "vocab_size"),
    integer("n_embd", "d_model", aliases=("hidden_size",)),
    integer("n_layer", "n_layers", aliases=("num_hidden_layers",)),
    integer("n_head", "attention.n_heads", aliases=("num_attention_heads",)),
    integer("n_inner", "feedforward.d_ff", lambda values: 4 * values["d_model"], null=same, get=lambda cfg: cfg.d_ff),
    *(INIT, eps(1e-5, "layer_norm_epsilon"), Dropout("resid_pdrop", "embd_pdrop", "attn_pdrop")),
)


def gpt2_like(
    type: str,
    class_names: tuple[str, str],
    base: Mapping[str, Any],
    entries: tuple[Entry, ...],
    block: Block | Callable[[ModelConfig], Block],
    tied: bool = True,
    **options: Any,
) -> Family:
    """Return a family with the tensor names of GPT-2 outside of its blocks. `tied` is the default of the head."""
    return describe(
        type,
        class_names,
        {**LAYER_NORM, **DENSE, **base},
        (*entries, Tied("transformer.", "lm_head.weight", "wte.weight", default=tied)),
        lambda config: names(block(config) if callable(block) else block, **ENDS),
        prefix="transformer.",
        embed="wte.weight",
        drops=MASKS,
        **options,
    )


def add_biases(config: ModelConfig) -> ModelConfig:
    """Return the config with all biases: GPT-2 always has them, and biases of zero do not change the function."""
    if not isinstance(config.norm, LayerNorm) or not isinstance(config.feedforward, Dense):
        return config
    return dataclasses.replace(
        config,
        attention=dataclasses.replace(config.attention, bias=True, out_bias=None),
        feedforward=dataclasses.replace(config.feedforward, bias=True),
        norm=dataclasses.replace(config.norm, bias=True),
    )


GPT2 = gpt2_like(
    "gpt2",
    ("GPT2LMHeadModel", "GPT2Model"),
    LEARNED,
    (
        *(*SIZES, max_len(1024, "n_positions"), activation("activation_function", "gelu_new")),
        Constant("n_ctx", lambda config: config.max_len),
        flag("scale_attn_weights", "attention.scale", True, None, 1.0),
        only("scale_attn_by_inverse_layer_idx", False, why=f"a scale that changes with the layer, {NO}"),
        only("add_cross_attention", False, why=f"cross-attention in a decoder-only model, {NO}"),
        only("is_decoder", False, True, why="which must be true or false"),
    ),
    {
        **{**NORMS, QKV: ("attn.c_attn", CONV1D), "attention.o": ("attn.c_proj", CONV1D)},
        **{ours: (theirs, CONV1D) for ours, theirs in MLP.items()},
    },
    name="GPT-2",
    keys=("n_embd", "n_layer", "n_head"),
    typical_names=("wte.weight", "wpe.weight", "ln_f.weight"),
    add_biases=add_biases,
)
BIGCODE = gpt2_like(
    "gpt_bigcode",
    classes("GPTBigCode"),
    LEARNED,
    (
        *(*SIZES, max_len(1024, "n_positions"), activation("activation_function", "gelu_pytorch_tanh")),
        flag("multi_query", "attention.n_kv_heads", True, 1, None, get=lambda config: config.n_kv_heads),
        flag("scale_attn_weights", "attention.scale", True, None, 1.0),
    ),
    lambda config: {
        **{**NORMS, QKV: ("attn.c_attn", PerHead(config.n_kv_heads)), "attention.o": "attn.c_proj"},
        **MLP,
    },
)


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
        data |= {"attention_types": [[kinds, 1]], "attention_layers": kinds}
        data["window_size"] = config.attention.window or 256


GPT_NEO = gpt2_like(
    "gpt_neo",
    classes("GPTNeo"),
    {**LEARNED, "attention": {"scale": 1.0, "bias": False, "out_bias": True}},
    (
        integer("vocab_size", "vocab_size"),
        integer("hidden_size", "d_model"),
        integer("num_layers", "n_layers"),
        integer("num_heads", "attention.n_heads"),
        integer("intermediate_size", "feedforward.d_ff", lambda values: 4 * values["d_model"], null=same),
        *(INIT, max_len(2048), activation("activation_function", "gelu_new"), eps(1e-5, "layer_norm_epsilon")),
        *(AttentionTypes(), Dropout("resid_dropout", "embed_dropout", "attention_dropout")),
    ),
    {
        **{**NORMS, **{f"attention.{x}": f"attn.attention.{x}_proj" for x in "qkv"}},
        **{"attention.o": "attn.attention.out_proj", **MLP},
    },
)


class RotaryDim:
    """The number of rotated components of a head, interleaved, with base 10,000."""

    def read(self, source: Source, values: Values) -> None:
        width = values["d_model"] / values["attention.n_heads"]
        values["position"] = Rotary(pairing="interleaved", fraction=source.integer("rotary_dim", 64) / width)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["rotary_dim"] = config.position.rotated(config.d_head) if isinstance(config.position, Rotary) else None


class CodeGenHeads(Transform):
    """q, v and k of CodeGen: 4 groups of heads, and in each group its queries, values and keys, in this order."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        grouped = theirs.view(4, 3, -1, *theirs.shape[1:])
        return [grouped[:, i].reshape(shape) for i, shape in zip((0, 2, 1), shapes, strict=True)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        q, k, v = (part.reshape(4, -1, *part.shape[1:]) for part in ours)
        return torch.stack([q, v, k], dim=1).reshape(-1, *ours[0].shape[1:])


PARALLEL = {"placement": "parallel", "attention": {"bias": False}, "head": {"bias": True}}
GPTJ_KEYS = (*SIZES, max_len(2048, "n_positions"), activation("activation_function", "gelu_new"), RotaryDim())
GPTJ_NAMES = {
    **{"norm": "ln_1", "attention.o": "attn.out_proj"},
    **{"feedforward.up": "mlp.fc_in", "feedforward.down": "mlp.fc_out"},
}
GPTJ = gpt2_like(
    *("gptj", classes("GPTJ"), PARALLEL, GPTJ_KEYS),
    {**GPTJ_NAMES, **{f"attention.{x}": f"attn.{x}_proj" for x in "qkv"}},
    tied=False,
)
CODEGEN = gpt2_like(
    *("codegen", classes("CodeGen"), PARALLEL, GPTJ_KEYS),
    {**GPTJ_NAMES, QKV: ("attn.qkv_proj", CodeGenHeads())},
    tied=False,
)
FAMILIES = (GPT2, BIGCODE, GPT_NEO, GPTJ, CODEGEN)
