"""Attention scores in any layout: as (B, H, T, S), and which keys they hide."""

from torch import Tensor

from glassformer.shapes import Bool, Float

FORBIDDEN = -1e30
"""A softmax input below this is masked whatever the scores are; values above it are judged by distance."""


def keys_last(shape: tuple[int, ...], queries: int, keys: int) -> list[int]:
    """The order of axes that puts queries and keys last; unchanged where they are, or are not found by their sizes."""
    usual = list(range(len(shape)))
    if len(shape) != 4 or shape[-2:] == (queries, keys):
        return usual
    key = next((axis for axis in reversed(usual) if shape[axis] == keys), None)
    query = next((axis for axis in reversed(usual) if shape[axis] == queries and axis != key), None)
    if key is None or query is None:
        return usual
    return [*(axis for axis in usual if axis not in (query, key)), query, key]


def as_heads(scores: Tensor, rows: int) -> Tensor | None:
    """Return (B,H,T,S) from (B,H,T,S), (H,B,T,S), (B·H,T,S), (B,T,S) or layouts of grouped heads, else None."""
    if scores.dim() == 4 and rows in scores.shape[:2]:
        return scores if scores.shape[0] == rows else scores.transpose(0, 1)
    if scores.dim() == 3 and scores.shape[0] % rows == 0:
        return scores.reshape(rows, scores.shape[0] // rows, *scores.shape[1:])
    if scores.dim() == 5 and scores.shape[0] == rows:  # grouped: (B,G,H/G,T,S)
        return scores.flatten(1, 2)
    if scores.dim() == 5 and scores.shape[1] == rows and scores.shape[0] == scores.shape[-1]:  # (T,B,G,H/G,S)
        return scores.permute(1, 2, 3, 0, 4).flatten(1, 2)
    return None


def hidden_keys(scores: Float[Tensor, "... S"]) -> Bool[Tensor, "... S"]:
    """Return which softmax inputs are masked: -inf, the dtype's minimum, or 5,000 below the largest of their query.

    Scores of correct models lie within some hundreds of one another; -1e4 and -1e9 are mask constants.
    """
    top = scores.amax(dim=-1, keepdim=True)
    return (scores <= FORBIDDEN) | (scores < top - 5000)
