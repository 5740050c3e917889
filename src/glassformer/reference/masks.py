"""Who may look at whom, and where each token stands.

A mask is boolean and True means may attend. Causality and the window go by index in the sequence; position schemes go
by position, which skips padding. The two differ as soon as a row starts with padding.
"""

import numpy as np
import numpy.typing as npt

from glassformer.reference.arrays import Mask, Tokens


def default_positions(B: int, T: int, mask: Mask | None) -> Tokens:
    """Position of each place, (B,T): the number of real tokens before it in its row.

    Without a (B,T) mask that is 0..T-1. A padding place gets max(count so far - 1, 0); nobody reads it.
    """
    if mask is None or mask.ndim != 2:
        return np.broadcast_to(np.arange(T), (B, T)).astype(np.int64)
    return np.maximum(np.cumsum(mask, axis=1) - 1, 0).astype(np.int64)


def architecture_mask(T: int, causal: bool, window: int | None) -> Mask:
    """(T,T), rows are queries: the pattern that the architecture itself allows.

    Causal: j <= i, with a window i - W < j <= i. Not causal: everything, with a window |i - j| < W.
    """
    query, key = np.arange(T)[:, None], np.arange(T)[None, :]
    allowed = key <= query if causal else np.ones((T, T), dtype=np.bool_)
    if window is not None:
        allowed = allowed & (np.abs(query - key) < window)
    return allowed


def self_mask(B: int, T: int, causal: bool, window: int | None, mask: Mask | None) -> Mask:
    """(B,T,T): the pattern of one layer's self-attention.

    A (B,T) mask hides padding from everybody and is combined with the architecture's pattern; a (B,T,T) mask replaces
    that pattern. Either way a query that would see nothing sees itself, so that no softmax is empty.
    """
    if mask is not None and mask.ndim == 3:
        allowed = mask
    else:
        real = np.ones((B, T), dtype=np.bool_) if mask is None else mask
        allowed = architecture_mask(T, causal, window)[None, :, :] & real[:, None, :]
    sees_nothing = ~allowed.any(axis=-1, keepdims=True)  # (B, T, 1)
    return allowed | (sees_nothing & np.eye(T, dtype=np.bool_))


def prefix_mask(prefix_lengths: npt.ArrayLike, T: int) -> Mask:
    """(B,T,T): the first P tokens of a row see each other freely, the rest is causal. Raffel et al. 2020, 3.2.2.

    Query i sees key j when j <= i or j < P.
    """
    query, key = np.arange(T)[:, None], np.arange(T)[None, :]
    lengths = np.asarray(prefix_lengths)[:, None, None]
    return (key <= query)[None, :, :] | (key[None, :, :] < lengths)


def as_mask(mask: npt.ArrayLike | None, B: int, T: int) -> Mask | None:
    """`mask` as booleans. Raises ValueError unless its shape is (B,T) or (B,T,T) and its values are 0/1 or booleans."""
    if mask is None:
        return None
    given = np.asarray(mask)
    if given.shape not in ((B, T), (B, T, T)):
        raise ValueError(f"mask has shape {given.shape}: give ({B}, {T}) for real tokens or ({B}, {T}, {T}).")
    if given.dtype != np.bool_ and not np.isin(given, (0, 1)).all():
        raise ValueError("a mask is boolean, True = may attend; these values look like an additive mask of 0 and -inf.")
    return given.astype(np.bool_)
