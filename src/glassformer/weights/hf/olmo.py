"""OLMo 1 to 3 and EXAONE 4. OLMo has norms without parameters. OLMo 2 normalizes each branch after it, and queries and
keys as a whole; OLMo 3 adds windows. EXAONE normalizes queries and keys by head."""

from glassformer.weights.family import Source
from glassformer.weights.hf.common import ATTENTION_BIAS, GATED, QK_NORM_EPS, RMS, UNTIED, classes, rope, sizes
from glassformer.weights.hf.layers import SLIDING, RopeByType, RotatedLayers, Windows, every
from glassformer.weights.hf.layouts import ATTENTION, FREQUENCIES, LLAMA, QK_NORMS, names
from glassformer.weights.hf.layouts import GATED as GATED_NAMES
from glassformer.weights.keys import Values, describe, eps, number

AFTER = {
    "norm_attention": "post_attention_layernorm",
    "norm_feedforward": "post_feedforward_layernorm",
    **ATTENTION,
    **QK_NORMS,
    **GATED_NAMES,
}
QK_NORM = {"attention": {"qk_norm": {"kind": "rms_norm"}, "qk_norm_over": "all"}}
OLMO2_KEYS = (*sizes(2048), ATTENTION_BIAS, eps(1e-5), QK_NORM_EPS, UNTIED)

OLMO = describe(
    "olmo",
    classes("Olmo"),
    {"norm": {"kind": "layer_norm", "weight": False, "bias": False}, **GATED},
    (*sizes(2048), ATTENTION_BIAS, UNTIED, number("clip_qkv", "attention.clip", None), rope()),
    names(LLAMA),
    drops=FREQUENCIES,
)
OLMO2 = describe(
    "olmo2", classes("Olmo2"), {**RMS, **GATED, **QK_NORM, "placement": "after"}, (*OLMO2_KEYS, rope()), names(AFTER)
)
OLMO3 = describe(
    "olmo3",
    classes("Olmo3"),
    {**RMS, **GATED, **QK_NORM, "placement": "after"},
    (*OLMO2_KEYS, Windows(4096, every(4)), RopeByType(500000.0, 500000.0)),
    names(AFTER),
)


def rotated(source: Source, values: Values) -> list[bool]:
    """EXAONE rotates in the layers with a window; in all layers if there is no window."""
    return [kind == SLIDING or not values.get("attention.window") for kind in values["_types"]]


EXAONE4 = describe(
    "exaone4",
    classes("Exaone4"),
    {**RMS, **GATED, "placement": "after", "attention": {"bias": False, "qk_norm": {"kind": "rms_norm"}}},
    (
        *(*sizes(2048, n_kv_heads=32), eps(1e-5), QK_NORM_EPS, UNTIED, rope()),
        Windows(4096, every(4, "sliding_window_pattern"), may_be_null=True),
        RotatedLayers(rotated),
    ),
    names(AFTER),
)
FAMILIES = (OLMO, OLMO2, OLMO3, EXAONE4)
