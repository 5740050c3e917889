"""Nemotron and Minitron: LayerNorm with weights around 0, squared ReLU without a gate, half of each head rotated."""

from glassformer.weights.hf.common import ATTENTION_BIAS, DENSE, MLP_BIAS, UNTIED, classes, rope, sizes
from glassformer.weights.hf.layouts import FREQUENCIES, LLAMA, names
from glassformer.weights.keys import describe, number

NEMOTRON = describe(
    "nemotron",
    classes("Nemotron"),
    {"norm": {"kind": "layer_norm", "offset": 1.0}, **DENSE},
    (
        *(*sizes(4096, act="relu2"), number("norm_eps", "norm.eps", 1e-5), UNTIED, rope(fraction=0.5)),
        *(ATTENTION_BIAS, MLP_BIAS),
    ),
    names(LLAMA),
    drops=FREQUENCIES,
)
FAMILIES = (NEMOTRON,)
