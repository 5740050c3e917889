"""Families of encoder-decoders."""

from glassformer.weights.seq2seq import bart, marian, t5

SEQ2SEQ = (*t5.FAMILIES, *bart.FAMILIES, *marian.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
