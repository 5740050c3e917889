"""GPT-NeoX and Pythia (parallel branches with two norms), and GPT-J and CodeGen (parallel with one)."""

from typing import Any

import torch
from torch import Tensor

from glassformer.config import ModelConfig, Rotary
from glassformer.weights.convert import Drop, PerHead, Row, Shape, Transform
from glassformer.weights.family import Source
from glassformer.weights.hf.common import DENSE, INIT, LAYER_NORM, classes
from glassformer.weights.hf.layers import Rope
from glassformer.weights.hf.layouts import QKV, names
from glassformer.weights.keys import (
    SIZES,
    WIDTH,
    Dropout,
    Tied,
    Values,
    activation,
    describe,
    eps,
    flag,
    integer,
    max_len,
    same,
)

NEOX_NAMES = {
    "norm_attention": "input_layernorm",
    "norm_feedforward": "post_attention_layernorm",
    "attention.o": "attention.dense",
    "feedforward.up": "mlp.dense_h_to_4h",
    "feedforward.down": "mlp.dense_4h_to_h",
}
MASKS = tuple(
    Drop(f"{{p}}{name}", "masks and frequencies, stored by old versions")
    for name in (
        *("layers.{i}.attention.bias", "layers.{i}.attention.masked_bias", "layers.{i}.attention.rotary_emb.inv_freq"),
        *("h.{i}.attn.bias", "h.{i}.attn.masked_bias", "h.{i}.attn.causal_mask"),
    )
)


def neox_rows(config: ModelConfig) -> tuple[Row, ...]:
    fused = {QKV: ("attention.query_key_value", PerHead(config.n_heads))}
    return names({**NEOX_NAMES, **fused}, embed="embed_in", norm="final_layer_norm", head="embed_out")


NEOX = describe(
    "gpt_neox",
    classes("GPTNeoX"),
    {**LAYER_NORM, **DENSE},
    (
        *(*SIZES, WIDTH, INIT, max_len(2048), activation("hidden_act", "gelu")),
        eps(1e-5, "layer_norm_eps"),
        flag("use_parallel_residual", "placement", True, "parallel_two", "pre"),
        flag("attention_bias", "attention.bias", True),
        Rope(fraction=0.25, old={"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}),
        Tied("gpt_neox.", "embed_out.weight", "embed_in.weight", default=False),
        Dropout("hidden_dropout", "attention_dropout"),
    ),
    neox_rows,
    prefix="gpt_neox.",
    embed="embed_in.weight",
    drops=MASKS,
)


class RotaryDim:
    """The number of rotated components of a head, interleaved, with base 10,000."""

    def read(self, source: Source, values: Values) -> None:
        width = values["d_model"] / values["attention.n_heads"]
        values["position"] = Rotary(pairing="interleaved", fraction=source.integer("rotary_dim", 64) / width)

    def write(self, config: ModelConfig, data: dict[str, Any]) -> None:
        data["rotary_dim"] = config.position.rotated(config.d_head) if isinstance(config.position, Rotary) else None


GPT2_SIZES = (
    integer("vocab_size", "vocab_size"),
    integer("n_embd", "d_model", aliases=("hidden_size",)),
    integer("n_layer", "n_layers", aliases=("num_hidden_layers",)),
    integer("n_head", "attention.n_heads", aliases=("num_attention_heads",)),
    integer("n_inner", "feedforward.d_ff", lambda values: 4 * values["d_model"], null=same, get=lambda cfg: cfg.d_ff),
    INIT,
    eps(1e-5, "layer_norm_epsilon"),
)
GPTJ_KEYS = (
    *(*GPT2_SIZES, max_len(2048, "n_positions"), activation("activation_function", "gelu_new"), RotaryDim()),
    Dropout("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    Tied("transformer.", "lm_head.weight", "wte.weight", default=False),
)
GPTJ_BASE = {
    **LAYER_NORM,
    **DENSE,
    "placement": "parallel",
    "attention": {"bias": False},
    "head": {"bias": True},
}
GPTJ_NAMES = {"norm": "ln_1", "attention.o": "attn.out_proj", "feedforward.up": "mlp.fc_in"}
GPTJ_NAMES |= {"feedforward.down": "mlp.fc_out"}
ENDS = {"layers": "{p}h.{i}", "embed": "wte", "norm": "ln_f"}


class CodeGenHeads(Transform):
    """q, v and k of CodeGen: 4 groups of heads, and in each group its queries, values and keys, in this order."""

    def ours(self, theirs: Tensor, shapes: list[Shape]) -> list[Tensor]:
        grouped = theirs.view(4, 3, -1, *theirs.shape[1:])
        return [grouped[:, i].reshape(shape) for i, shape in zip((0, 2, 1), shapes, strict=True)]

    def theirs(self, ours: list[Tensor]) -> Tensor:
        q, k, v = (part.reshape(4, -1, *part.shape[1:]) for part in ours)
        return torch.stack([q, v, k], dim=1).reshape(-1, *ours[0].shape[1:])


GPTJ = describe(
    "gptj",
    classes("GPTJ"),
    GPTJ_BASE,
    GPTJ_KEYS,
    names({**GPTJ_NAMES, **{f"attention.{x}": f"attn.{x}_proj" for x in "qkv"}}, **ENDS),
    prefix="transformer.",
    embed="wte.weight",
    drops=MASKS,
)
CODEGEN = describe(
    "codegen",
    classes("CodeGen"),
    GPTJ_BASE,
    GPTJ_KEYS,
    names({**GPTJ_NAMES, QKV: ("attn.qkv_proj", CodeGenHeads())}, **ENDS),
    prefix="transformer.",
    embed="wte.weight",
    drops=MASKS,
)
FAMILIES = (NEOX, GPTJ, CODEGEN)
