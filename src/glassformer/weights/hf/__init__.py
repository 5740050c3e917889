"""Families of decoder-only models, each described by the keys of its config.json and the names of its tensors."""

from glassformer.weights.family import Family
from glassformer.weights.hf import (
    alibi,
    cohere,
    deepseek,
    falcon,
    gemma,
    glm,
    gpt_neo,
    gpt_oss,
    granite,
    llama_like,
    neox,
    olmo,
    opt,
    other_moe,
    phi,
    qwen_moe,
    smollm,
    squared_relu,
    stablelm,
    starcoder,
)

MODULES = (
    *(llama_like, phi, neox, gpt_neo, opt, alibi, falcon, stablelm, olmo, granite, cohere, smollm, starcoder, glm),
    *(squared_relu, gemma, qwen_moe, gpt_oss, deepseek, other_moe),
)
DECODERS: tuple[Family, ...] = tuple(family for module in MODULES for family in module.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
