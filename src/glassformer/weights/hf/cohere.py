"""Cohere's Command: parallel branches with one norm, LayerNorm without bias, interleaved rotation, scaled logits.

Command R7B and Command A (cohere2) rotate only in the layers with a window.
"""

from glassformer.weights.family import Source
from glassformer.weights.hf.common import ATTENTION_BIAS, GATED, TIED, classes, qk_norm, rope, sizes
from glassformer.weights.hf.layers import SLIDING, RotatedLayers, Windows, every
from glassformer.weights.hf.layouts import ATTENTION, QK_NORMS, names
from glassformer.weights.hf.layouts import GATED as GATED_NAMES
from glassformer.weights.keys import Values, describe, eps, number

NORM = {"kind": "layer_norm", "bias": False}
BASE = {"placement": "parallel", "norm": NORM, **GATED}
KEYS = (eps(1e-5, "layer_norm_eps"), ATTENTION_BIAS, TIED, number("logit_scale", "head.scale", 0.0625))
NAMES = names({"norm": "input_layernorm", **ATTENTION, **QK_NORMS, **GATED_NAMES})


def rotated(source: Source, values: Values) -> list[bool]:
    return [kind == SLIDING for kind in values["_types"]]


COHERE = describe(
    "cohere",
    classes("Cohere"),
    BASE,
    (
        *(*sizes(8192), *KEYS, rope(500000.0, pairing="interleaved")),
        *qk_norm("use_qk_norm", NORM, over="heads"),
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
