"""Granite: Llama with factors on embedding, scores, branches and logits."""

from glassformer.weights.hf.common import ATTENTION_BIAS, GATED, MLP_BIAS, RMS, UNTIED, classes, eps, rope, sizes
from glassformer.weights.hf.layouts import FREQUENCIES, LLAMA, names
from glassformer.weights.keys import describe, number

FACTORS = (
    number("embedding_multiplier", "embedding.scale", 1.0),
    number("residual_multiplier", "residual_scale", 1.0),
    # the factor on q.k itself; it is 1 if it is absent, not 1/sqrt(K)
    number("attention_multiplier", "attention.scale", 1.0, get=lambda config: config.scale),
    number("logits_scaling", "head.scale", 1.0, decode=lambda given: 1 / given, encode=lambda scale: 1 / scale),
)
GRANITE = describe(
    "granite",
    classes("Granite"),
    {**RMS, **GATED},
    (*sizes(2048), ATTENTION_BIAS, MLP_BIAS, eps(1e-6), UNTIED, rope(), *FACTORS),
    names(LLAMA),
    drops=FREQUENCIES,
)
FAMILIES = (GRANITE,)
