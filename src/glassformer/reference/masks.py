"""Attention masks and position ids.

A mask is boolean, True = may attend. The causal mask and the sliding window are defined by the index of a token in the
sequence. Position schemes read position ids, which do not count padding. The two differ as soon as a sequence starts
with padding.
"""

import numpy as np
import numpy.typing as npt

from glassformer.reference.arrays import Mask, Tokens


def default_positions(B: int, T: int, mask: Mask | None) -> Tokens:
    """Return the position ids (B,T): the number of real tokens before each token of its sequence.

    Without a (B,T) mask the position ids are 0..T-1. A padding token gets max(count so far - 1, 0), which has no effect
    because no real token attends to it.
    """
    if mask is None or mask.ndim != 2:
        return np.broadcast_to(np.arange(T), (B, T)).astype(np.int64)
    return np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int64)


def architecture_mask(T: int, causal: bool, window: int | None) -> Mask:
    """Return the mask (T,T) of the architecture itself, without padding: queries are rows, keys are columns.

    causal          j <= i         with a window W:  i - W < j <= i
    bidirectional   all i and j    with a window W:  |i - j| < W
    """
    query, key = np.arange(T)[:, None], np.arange(T)[None, :]
    allowed = key <= query if causal else np.ones((T, T), dtype=np.bool_)
    if window is not None:
        allowed = allowed & (np.abs(query - key) < window)
    return allowed


def self_mask(B: int, T: int, causal: bool, window: int | None, mask: Mask | None) -> Mask:
    """Return the self-attention mask (B,T,T) of one layer.

    A padding mask (B,T) hides padding keys from every query and is combined with the mask of the architecture. An
    attention mask (B,T,T) replaces the mask of the architecture. In both cases a query whose keys are all masked
    attends to itself, so that no softmax is empty.
    """
    if mask is not None and mask.ndim == 3:
        allowed = mask
    else:
        real = np.ones((B, T), dtype=np.bool_) if mask is None else mask
        allowed = architecture_mask(T, causal, window)[None, :, :] & real[:, None, :]
    fully_masked = ~allowed.any(axis=-1, keepdims=True)  # (B, T, 1)
    return allowed | (fully_masked & np.eye(T, dtype=np.bool_))


def prefix_mask(prefix_lengths: npt.ArrayLike, T: int) -> Mask:
    """Return the prefix-LM mask (B,T,T): bidirectional over the first P tokens, causal after them.

        query i attends to key j   if   j <= i or j < P

    `prefix_lengths` (B,) gives P for each sequence. Raffel et al. 2020, section 3.2.2.
    """
    query, key = np.arange(T)[:, None], np.arange(T)[None, :]
    lengths = np.asarray(prefix_lengths)[:, None, None]
    return (key <= query)[None, :, :] | (key[None, :, :] < lengths)


def as_mask(mask: npt.ArrayLike | None, B: int, T: int) -> Mask | None:
    """Return `mask` as booleans.

    Raises:
        ValueError: the shape is neither (B,T) nor (B,T,T), or the values are neither booleans nor 0 and 1.
    """
    if mask is None:
        return None
    given = np.asarray(mask)
    if given.shape not in ((B, T), (B, T, T)):
        raise ValueError(
            f"mask has shape {given.shape}: give ({B}, {T}) to mark padding or ({B}, {T}, {T}) for an attention mask."
        )
    if given.dtype != np.bool_ and not np.isin(given, (0, 1)).all():
        raise ValueError(
            "the mask has values other than 0 and 1, as an additive mask of 0 and -inf has: give a boolean mask, "
            "True = may attend."
        )
    return given.astype(np.bool_)
