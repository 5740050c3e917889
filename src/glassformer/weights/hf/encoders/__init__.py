"""Families of encoder-only models."""

from glassformer.weights.hf.encoders import bert
from glassformer.weights.hf.encoders.albert import ALBERT
from glassformer.weights.hf.encoders.electra import ELECTRA
from glassformer.weights.hf.encoders.eurobert import EUROBERT
from glassformer.weights.hf.encoders.modernbert import MODERNBERT
from glassformer.weights.hf.encoders.mpnet import MPNET
from glassformer.weights.hf.encoders.nomic_bert import NOMIC_BERT

ENCODERS = (ELECTRA, ALBERT, MPNET, MODERNBERT, NOMIC_BERT, EUROBERT, *bert.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
