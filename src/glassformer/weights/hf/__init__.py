"""Families of decoder-only models, each described by the keys of its config.json and the names of its tensors."""

from glassformer.weights.family import Family
from glassformer.weights.hf import (
    alibi,
    cohere,
    deepseek,
    falcon,
    gemma,
    gpt2,
    gpt_oss,
    granite,
    llama,
    llama_like,
    neox,
    olmo,
    opt,
    other_moe,
    phi,
    qwen_moe,
    squared_relu,
    stablelm,
)

MODULES = (
    *(gpt2, llama, llama_like, phi, neox, opt, alibi, falcon, stablelm, olmo, granite, cohere),
    *(squared_relu, gemma, qwen_moe, gpt_oss, deepseek, other_moe),
)
DECODERS: tuple[Family, ...] = tuple(family for module in MODULES for family in module.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
