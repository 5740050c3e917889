"""Families of encoder-decoders."""

from glassformer.weights.seq2seq import bart, marian
from glassformer.weights.seq2seq.mt5 import MT5

SEQ2SEQ = (MT5, *bart.FAMILIES, *marian.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
