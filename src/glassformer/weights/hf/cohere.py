"""Cohere's Command: parallel branches with one norm, LayerNorm without bias, interleaved rotation, scaled logits.

Command R7B and Command A (cohere2) rotate only in the layers with a window.
"""

from glassformer.weights.family import Source
from glassformer.weights.hf.common import ATTENTION_BIAS, GATED, TIED, classes, rope, sizes
from glassformer.weights.hf.layers import SLIDING, RotatedLayers, Windows, every
from glassformer.weights.hf.layouts import ATTENTION, QK_NORMS, names
from glassformer.weights.hf.layouts import GATED as GATED_NAMES
from glassformer.weights.keys import Derived, Values, describe, flag, number

BASE = {"placement": "parallel", "norm": {"kind": "layer_norm", "bias": False}, **GATED}
NORM = {"kind": "layer_norm", "bias": False}
KEYS = (number("layer_norm_eps", "norm.eps", 1e-5), ATTENTION_BIAS, TIED, number("logit_scale", "head.scale", 0.0625))
NAMES = names({"norm": "input_layernorm", **ATTENTION, **QK_NORMS, **GATED_NAMES})


def rotated(source: Source, values: Values) -> list[bool]:
    return [kind == SLIDING for kind in values["_types"]]


def qk_norm(values: Values) -> object:
    return {**NORM, "eps": values["norm.eps"]} if values["_qk_norm"] else None


COHERE = describe(
    "cohere",
    classes("Cohere"),
    BASE,
    (
        *(*sizes(8192), *KEYS, rope(500000.0, pairing="interleaved")),
        flag("use_qk_norm", "_qk_norm", False, get=lambda config: config.attention.qk_norm is not None),
        Derived("attention.qk_norm", qk_norm),
        Derived("attention.qk_norm_over", lambda values: "heads" if values["_qk_norm"] else "head"),
    ),
    NAMES,
)
COHERE2 = describe(
    "cohere2",
    classes("Cohere2"),
    BASE,
    (
        *sizes(8192),
        *KEYS,
        Windows(4096, every(4, "sliding_window_pattern")),
        rope(pairing="interleaved"),
        RotatedLayers(rotated),
    ),
    NAMES,
)
FAMILIES = (COHERE, COHERE2)
