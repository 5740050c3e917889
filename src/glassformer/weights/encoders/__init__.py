"""Families of encoder-only models."""

from glassformer.weights.encoders import bert
from glassformer.weights.encoders.albert import ALBERT
from glassformer.weights.encoders.electra import ELECTRA
from glassformer.weights.encoders.eurobert import EUROBERT
from glassformer.weights.encoders.gte import GTE
from glassformer.weights.encoders.jina import JINA
from glassformer.weights.encoders.modernbert import MODERNBERT
from glassformer.weights.encoders.mpnet import MPNET
from glassformer.weights.encoders.nomic_bert import NOMIC_BERT

ENCODERS = (ELECTRA, ALBERT, MPNET, MODERNBERT, NOMIC_BERT, EUROBERT, GTE, JINA, *bert.FAMILIES)
"""Every family of this folder, in the order in which saving tries them."""
