"""Entries of config.json that most families with Llama's key names share."""

from collections.abc import Mapping
from typing import Any

from glassformer.config.position import WaveLayout
from glassformer.weights.hf.layers import Rope
from glassformer.weights.keys import (
    INIT,
    SIZES,
    WIDTH,
    Derived,
    Entry,
    Tied,
    activation,
    flag,
    groups,
    head_dim,
    max_len,
)

TIED = Tied("model.", "lm_head.weight", "embed_tokens.weight", default=True)
UNTIED = Tied("model.", "lm_head.weight", "embed_tokens.weight", default=False)
ATTENTION_BIAS = flag("attention_bias", "attention.bias", False)
MLP_BIAS = flag("mlp_bias", "feedforward.bias", False)
RMS: dict[str, Any] = {"norm": {"kind": "rms_norm"}}
LAYER_NORM: dict[str, Any] = {"norm": {"kind": "layer_norm"}}
DENSE: dict[str, Any] = {"feedforward": {"kind": "dense"}}
GATED: dict[str, Any] = {"feedforward": {"kind": "gated"}}
NO_BIAS: dict[str, Any] = {"attention": {"bias": False}}


def classes(name: str) -> tuple[str, str]:
    """Return the names of the transformers classes with and without a head."""
    return f"{name}ForCausalLM", f"{name}Model"


def sizes(
    context: int,
    *,
    n_kv_heads: int | None = None,
    d_head: int | None = None,
    act: str = "silu",
) -> tuple[Entry, ...]:
    """Return the entries of all sizes; the arguments are the defaults of the family."""
    return (*SIZES, WIDTH, INIT, groups(n_kv_heads), head_dim(d_head), max_len(context), activation("hidden_act", act))


def rope(theta: float = 10000.0, fraction: float | None = None, pairing: WaveLayout = "halves") -> Rope:
    """Return the entry of rotary positions."""
    return Rope(theta, pairing, fraction)


SAME_BIAS = Derived("feedforward.bias", lambda values: values["attention.bias"])
"""The feed-forward has biases if attention has them."""
QK_NORM_EPS = Derived("attention.qk_norm.eps", lambda values: values["norm.eps"])
"""The norm of queries and keys has the epsilon of the model's norm."""


def qk_norm(key: str, norm: Mapping[str, Any], default: bool = False, over: str = "head") -> tuple[Entry, Entry, Entry]:
    """Return the entries of a flag that adds norms of queries and keys, with the epsilon of the model's norm."""
    return (
        flag(key, "_qk_norm", default, get=lambda config: config.attention.qk_norm is not None),
        Derived(
            "attention.qk_norm", lambda values: {**norm, "eps": values["norm.eps"]} if values["_qk_norm"] else None
        ),
        Derived("attention.qk_norm_over", lambda values: over if values["_qk_norm"] else "head"),
    )
