"""The next token on a CPU: what `sampling.distribution` and `sampling.choose` return, with NumPy, one row at a time.

The filters of `sampling` read and write the whole vocabulary. Of 262,144 tokens that takes 2 to 30 milliseconds, more
than a step of a small model. Here each filter reads only the tokens that the one before it has left, and the largest
logits are found without sorting the others.
"""

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from glassformer.shapes import Float, Int

if TYPE_CHECKING:
    from glassformer.generation.sampling import Sampling

Row = np.ndarray[Any, Any]
"""The logits, weights or ids of one row."""
LONG = 1024
"""Numbers from which a nucleus is divided into buckets."""
BUCKETS = 4096
PER_NAT = 64.0
"""Buckets of a nucleus: tokens whose logits are between i and i + 1 of these shares of a nat below the largest."""
BLOCK = 64
"""Neighbours of which only the largest is looked at, unless it is one of the largest of all blocks."""
PART = 256
"""Neighbours whose weights are added before it is known into which of these parts a draw falls."""
_HELD = threading.local()


@np.errstate(over="ignore", invalid="ignore")  # the caller refuses NaN, in one sentence
def distribution(logits: Float[Tensor, "B V"], sampling: "Sampling") -> Float[Tensor, "B V"]:
    """Return the probabilities of all tokens, without a penalty on repetition, for a temperature that is not 0."""
    found = np.zeros(logits.shape)
    for row, probabilities in zip(logits.numpy(), found, strict=True):
        ids, weights = drawable(row, sampling)
        probabilities[slice(None) if ids is None else ids] = weights / weights.sum()
    return torch.from_numpy(found)


@np.errstate(over="ignore", invalid="ignore")
def choose(logits: Float[Tensor, "B V"], sampling: "Sampling", uniform: Float[Tensor, "B"]) -> Int[Tensor, "B"]:
    """Draw a token for each row, the one that `sampling.draw` draws from the distribution; the id V if it has NaN."""
    rows = zip(logits.numpy(), uniform.tolist(), strict=True)
    return torch.tensor([_draw(row, sampling, share) for row, share in rows])


def drawable(row: Row, sampling: "Sampling") -> tuple[Row | None, Row]:
    """Return the ids that can be drawn, in order, and their probabilities times some number; ids None: all.

    A NaN makes all of these NaN. They are valid until the next call in this thread.
    """
    ids = None
    if sampling.top_k is not None and sampling.top_k < len(row):
        ids = np.flatnonzero(~(row < most_likely(row, sampling.top_k)[-1]))
        row = row[ids]
    scaled = _scratch("scaled", len(row))
    np.divide(row, sampling.temperature, out=scaled, dtype=np.float64)
    scaled -= scaled.max()
    if sampling.top_p < 1:
        kept = nucleus(scaled, sampling.top_p)
        ids, scaled = kept if ids is None else ids[kept], scaled[kept]
    if sampling.min_p > 0:
        kept = np.flatnonzero(~(scaled < np.log(sampling.min_p) - 1e-6))  # and some below it, so that few are computed
        kept = kept[~(np.exp(scaled[kept]) < sampling.min_p)]
        ids, scaled = kept if ids is None else ids[kept], scaled[kept]
    return ids, np.exp(scaled, out=scaled)


def nucleus(scaled: Row, p: float) -> Row:
    """Return the indices of the most likely tokens (ties: lowest first) whose probabilities sum to p, in order.

    `scaled` are logits minus the largest. Of a long row only one bucket is sorted: the one in which the sum reaches p.
    """
    weights = np.exp(scaled, out=_scratch("weights", len(scaled)))
    wanted = p * weights.sum()
    if np.isnan(wanted):
        return np.arange(len(scaled))
    kept, unsure, before = np.zeros(len(scaled), dtype=bool), np.arange(len(scaled)), 0.0
    if len(scaled) >= LONG:
        place = np.multiply(scaled, -PER_NAT, out=_scratch("place", len(scaled)))
        np.minimum(place, BUCKETS - 1, out=place)
        buckets = _scratch("buckets", len(scaled), np.intp)
        np.copyto(buckets, place, casting="unsafe")
        sums = np.bincount(buckets, weights, BUCKETS).cumsum()
        edge = min(int(np.searchsorted(sums, wanted)), BUCKETS - 1)
        kept, unsure, before = buckets < edge, np.flatnonzero(buckets == edge), sums[edge - 1] if edge else 0.0
    order = unsure[np.argsort(-scaled[unsure], kind="stable")]
    likely = weights[order]
    kept[order[before + (likely.cumsum() - likely) < wanted]] = True  # those before which the sum is below p
    return np.flatnonzero(kept)


def most_likely(row: Row, count: int) -> Row:
    """Return the largest numbers of a row, the largest first; NaN count as the largest."""
    held = torch.from_numpy(row)
    blocks = held[: len(row) // BLOCK * BLOCK].reshape(-1, BLOCK)
    if len(blocks) > 2 * count:  # no other block than these has one of the largest
        chosen = blocks[blocks.amax(1).topk(count).indices]
        held = torch.cat([chosen.flatten(), held[blocks.numel() :]])
    found: Row = held.topk(count).values.numpy()
    return found


def _scratch(name: str, size: int, dtype: Any = np.float64) -> Row:
    """Return memory of this thread. The system would clear what is allocated for each token, which takes longer."""
    held: dict[str, Row] = _HELD.__dict__
    if name not in held or len(held[name]) < size:
        held[name] = np.empty(size, dtype)
    return held[name][:size]


def _draw(row: Row, sampling: "Sampling", share: float) -> int:
    ids, weights = drawable(row, sampling)
    ends = np.add.reduceat(weights, np.arange(0, len(weights), PART)).cumsum()
    threshold = share * ends[-1]
    part = int(np.searchsorted(ends, threshold, side="right"))
    if part == len(ends):  # NaN
        return len(row)
    inside = weights[part * PART : (part + 1) * PART]
    sums = inside.cumsum() + (ends[part - 1] if part else 0.0)
    at = int(np.searchsorted(sums, threshold, side="right"))
    if at == len(inside):  # added in another order, they sum to less than the part: it is the last that can be drawn
        at = int(np.flatnonzero(inside)[-1])
    at += part * PART
    return at if ids is None else int(ids[at])
