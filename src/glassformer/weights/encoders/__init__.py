"""Families of encoder-only models."""

from glassformer.weights.encoders import albert, bert, eurobert, modernbert, rotary_bert

MODULES = (bert, albert, modernbert, rotary_bert, eurobert)
ENCODERS = tuple(family for module in MODULES for family in module.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
