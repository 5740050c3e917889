"""Families of decoder-only models, each described by the keys of its config.json and the names of its tensors."""

from glassformer.weights.family import Family
from glassformer.weights.hf import (
    alibi,
    cohere,
    falcon,
    gemma,
    glm,
    gpt_neo,
    granite,
    llama_like,
    nemotron,
    neox,
    olmo,
    opt,
    persimmon,
    phi,
    smollm,
    stablelm,
    starcoder,
)

MODULES = (
    *(llama_like, phi, neox, gpt_neo, opt, alibi, falcon, stablelm, olmo, granite, cohere, smollm, starcoder, glm),
    *(nemotron, gemma, persimmon),
)
DECODERS: tuple[Family, ...] = tuple(family for module in MODULES for family in module.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
