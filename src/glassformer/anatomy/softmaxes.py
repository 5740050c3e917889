"""Softmaxes that are written out: exp(s - logsumexp(s)), the exp of a log-softmax, exp over its sum.

Each is replaced in the graph by one softmax of the scores, where the numbers are those of a softmax, so that every
reader finds it. A mask that multiplies the exponentials becomes one that is written over the scores.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from glassformer.anatomy.record import Node

SAME = {torch.float64: 1e-6, torch.float32: 1e-4}
"""How far a weight may be from softmax's; a small number added to the sum stays below. Other dtypes: 1e-2."""
MASKS = ("mul", "masked_fill", "where", "tril", "triu")


def fold_softmaxes(nodes: list["Node"]) -> list["Node"]:
    """Change the nodes of softmaxes that are written out in place, and return the list."""
    for node in nodes:
        if node.op == "exp" and node.live and node.value.dim() > 1:
            scores = _scores(node.inputs[0])
            for axis in range(node.value.dim()):
                if _is_softmax(node.value, scores.value, axis):
                    _fold(node, scores, axis)
                    break
            else:
                _fold_quotient(node, scores)
    return nodes


def _scores(read: "Node") -> "Node":
    """What exp reads before a maximum, a logarithm of a sum, or a log-softmax was taken from it."""
    if read.op == "_log_softmax":
        return read.inputs[0]
    if read.op == "sub" and len(read.inputs) == 2 and read.inputs[0].live:
        scores, less = read.inputs
        if scores.value.shape == read.value.shape and less.value.numel() < scores.value.numel():
            return scores
    return read


def _fold_quotient(exponential: "Node", scores: "Node") -> None:
    """Fold e / sum(e), also where a mask changed e before."""
    for top in _masked(exponential):
        for quotient in top.users:
            if quotient.op not in ("div", "mul") or quotient.value.shape != top.value.shape:
                continue
            other = next((n for n in quotient.inputs if n is not top), None)
            if other is None or not other.live or other.value.dim() != top.value.dim():
                continue
            axes = [i for i, size in enumerate(other.value.shape) if size == 1 < top.value.shape[i]]
            hidden = (top.value == 0) & (exponential.value != 0)
            values = scores.value.masked_fill(hidden, -torch.inf)
            if len(axes) == 1 and _is_softmax(quotient.value, values, axes[0]):
                if top is not exponential:
                    top.op, top.args, top.inputs, top.value = "masked_fill", (scores,), [scores], values
                    scores.users.append(top)
                _fold(quotient, scores if top is exponential else top, axes[0])
                return


def _masked(exponential: "Node") -> Iterator["Node"]:
    """The exponentials, and each result of a mask on them: every number as it was, or 0."""
    yield exponential
    for node in exponential.users:
        if node.op in MASKS and node.value.shape == exponential.value.shape:
            kept = node.value != 0
            if torch.equal(node.value[kept], exponential.value[kept]):
                yield node


def _is_softmax(weights: Tensor, scores: Tensor, axis: int) -> bool:
    if weights.shape != scores.shape or weights.shape[axis] < 2 or not scores.is_floating_point():
        return False
    total = weights.detach().sum(axis, dtype=torch.float64)
    bound = SAME.get(weights.dtype, 1e-2)
    if not bool(((total - 1).abs() <= 10 * bound)[~total.isnan()].all()) or bool(total.isnan().all()):
        return False
    return torch.allclose(weights, scores.softmax(axis), rtol=0, atol=bound, equal_nan=True)


def _fold(node: "Node", scores: "Node", axis: int) -> None:
    node.op, node.args, node.kwargs, node.inputs = "_softmax", (scores, axis, False), {}, [scores]
    scores.users.append(node)
