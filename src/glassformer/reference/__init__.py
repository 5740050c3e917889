"""The oracle: a complete Transformer in NumPy float64, forward and backward, written to be checked and to be read.

It imports numpy and `glassformer.config` and nothing else, so it shares no code with `glassformer.model`. Start with
`forward.py` and follow its imports down, then read `backward.py` in the same way. `decode.py` generates text with it.

Shapes use the letters of docs/shapes.md: B batch, T query positions, S key positions, D model width, H query heads,
G key/value heads, K query/key width of a head, U value width of a head, F feed-forward width, E experts, A active
experts, L layers, V vocabulary size, W window.
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
