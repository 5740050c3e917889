"""Attention masks. One polarity everywhere: True = may attend. context.py combines them for a forward pass."""

import torch
from torch import Tensor

from glassformer.shapes import Bool, Int


def causal(queries: Int[Tensor, "T"], keys: Int[Tensor, "S"]) -> Bool[Tensor, "T S"]:
    """A query attends to keys at its own index and before."""
    return keys[None, :] <= queries[:, None]


def window(queries: Int[Tensor, "T"], keys: Int[Tensor, "S"], width: int) -> Bool[Tensor, "T S"]:
    """Keys fewer than `width` positions away: a query attends to itself and width - 1 neighbours on each side."""
    return (queries[:, None] - keys[None, :]).abs() < width


def prefix(lengths: Int[Tensor, "B"], size: int) -> Bool[Tensor, "B T T"]:
    """The prefix-LM pattern for `mask=`: the first lengths[b] tokens attend to each other, the rest is causal."""
    index = torch.arange(size, device=lengths.device)
    return causal(index, index)[None] | (index[None, None, :] < lengths[:, None, None])


def padding(real: Bool[Tensor, "B S"]) -> Bool[Tensor, "B 1 1 S"]:
    """No query attends to a padding token."""
    return real[:, None, None, :]
