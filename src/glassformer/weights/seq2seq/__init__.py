"""Families of encoder-decoders."""

from glassformer.weights.seq2seq import bart, marian, t5

MODULES = (t5, bart, marian)
SEQ2SEQ = tuple(family for module in MODULES for family in module.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
