"""Families of encoder-only models."""

from glassformer.weights.hf.encoders import bert
from glassformer.weights.hf.encoders.albert import ALBERT
from glassformer.weights.hf.encoders.electra import ELECTRA
from glassformer.weights.hf.encoders.mpnet import MPNET

ENCODERS = (ELECTRA, ALBERT, MPNET, *bert.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
