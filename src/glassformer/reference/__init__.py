"""The oracle: a whole Transformer in NumPy and float64, forward and backward, for checking and for reading.

It imports numpy and `glassformer.config` and nothing else; the engine is never consulted. A reader starts with
`forward.py` and follows its imports down, then reads `backward.py` the same way; `decode.py` writes text with it.
"""

from glassformer.reference.backward import loss, loss_and_gradients, loss_and_gradients_seq2seq, sgd
from glassformer.reference.decode import (
    Hypothesis,
    beam,
    beam_search,
    beam_seq2seq,
    greedy,
    greedy_seq2seq,
    sequence_log_probability,
)
from glassformer.reference.forward import encode, forward, forward_seq2seq, pool
from glassformer.reference.masks import prefix_mask
from glassformer.reference.params import random_params, shapes
from glassformer.reference.sampling import distribution

__all__ = [
    "Hypothesis",
    "beam",
    "beam_search",
    "beam_seq2seq",
    "distribution",
    "encode",
    "forward",
    "forward_seq2seq",
    "greedy",
    "greedy_seq2seq",
    "loss",
    "loss_and_gradients",
    "loss_and_gradients_seq2seq",
    "pool",
    "prefix_mask",
    "random_params",
    "sequence_log_probability",
    "sgd",
    "shapes",
]
