"""What a query may see. One polarity everywhere: True = may attend.

Causality and windows go by the index of a token in its sequence, not by the position number it was given, so shifted or
repeated positions never open the future.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from glassformer.shapes import Bool, Int


class View(NamedTuple):
    """What attention hands to its kernel: a mask, or nothing, or the promise that it is the plain causal triangle."""

    mask: Bool[Tensor, "#B 1 T S"] | None
    is_causal: bool


def causal(queries: Int[Tensor, "T"], keys: Int[Tensor, "S"]) -> Bool[Tensor, "T S"]:
    """A key is seen from its own index on."""
    return keys[None, :] <= queries[:, None]


def window(queries: Int[Tensor, "T"], keys: Int[Tensor, "S"], width: int) -> Bool[Tensor, "T S"]:
    """Keys fewer than `width` places away: a query sees itself and width - 1 neighbours on each side."""
    return (queries[:, None] - keys[None, :]).abs() < width


def prefix(lengths: Int[Tensor, "B"], size: int) -> Bool[Tensor, "B T T"]:
    """The prefix-LM pattern, to be given as `mask=`: the first lengths[b] tokens see each other, the rest is causal."""
    index = torch.arange(size, device=lengths.device)
    return causal(index, index)[None] | (index[None, None, :] < lengths[:, None, None])


def padding(real: Bool[Tensor, "B S"]) -> Bool[Tensor, "B 1 1 S"]:
    """Nobody sees a padding token."""
    return real[:, None, None, :]


def self_view(
    queries: Int[Tensor, "T"],
    keys: Int[Tensor, "S"],
    real: Bool[Tensor, "#B S"] | None,
    is_causal: bool,
    width: int | None,
    fixed: bool = False,
) -> View:
    """Everything combined for self-attention, as no mask at all where none is needed.

    `fixed` says that keys may be empty slots of a buffer, so that the shortcuts do not hold. A query that would see
    nothing sees itself: no row of a softmax is empty.
    """
    T, S = len(queries), len(keys)
    if not fixed and width is not None and width >= S:
        width = None
    if not fixed and real is None and width is None and (not is_causal or T == 1 or T == S):
        return View(None, is_causal and T > 1)
    allowed = causal(queries, keys) if is_causal else torch.ones(T, S, dtype=torch.bool, device=keys.device)
    if width is not None:
        allowed = allowed & window(queries, keys, width)
    allowed = allowed[None, None]
    if real is not None:
        allowed = (allowed & padding(real)) | (keys[None, :] == queries[:, None])
    return View(allowed, False)
