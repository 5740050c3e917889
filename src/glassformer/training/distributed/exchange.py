"""Differentiable exchanges between the ranks of a group: copy, sum, gather and scatter.

Each is a pair: what one does in the forward pass, its partner does in the backward pass.

    copy      x                                  sum of the gradients of all ranks, each of which used x for its part
    add       sum of the parts of all ranks      the gradient, which is the same on all of them
    gather    the parts of all ranks, joined     sum over ranks of the gradient, of which each keeps its part
    scatter   sum over ranks, own part of it     the parts of all ranks, joined
    join      the parts of all ranks, joined     own part of the gradient, which is the same on all ranks
    part      own part of x, the same on all     the parts of all ranks, joined

A part is a range of one dimension. Parts differ by at most one in length (`bounds`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def bounds(length: int, rank: int, size: int) -> tuple[int, int]:
    """Return the range of `length` that one of `size` ranks holds."""
    return length * rank // size, length * (rank + 1) // size


def gather_into(out: Tensor, x: Tensor, group: Any) -> None:
    """Gather the tensors of all ranks of a group into `out`, which is flat as they are."""
    import torch.distributed as dist

    # torch 2.13 has a new name for it
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x, group=group)


@dataclass(frozen=True)
class Ranks:
    """The ranks of an exchange, and which of them this process is."""

    group: Any
    rank: int
    size: int

    def bounds(self, length: int) -> tuple[int, int]:
        """Return the range of `length` that this rank holds."""
        return bounds(length, self.rank, self.size)

    def copy(self, x: Tensor) -> Tensor:
        return exchange(x, lambda x: x.view_as(x), self.total)

    def add(self, x: Tensor) -> Tensor:
        return exchange(x, self.total, lambda gradient: gradient)

    def gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        return exchange(x, lambda x: self.joined(x, dim, length), lambda gradient: self.summed_part(gradient, dim))

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        length = x.shape[dim]
        return exchange(x, lambda x: self.summed_part(x, dim), lambda gradient: self.joined(gradient, dim, length))

    def join(self, x: Tensor, dim: int, length: int) -> Tensor:
        return exchange(x, lambda x: self.joined(x, dim, length), lambda gradient: self.own(gradient, dim))

    def part(self, x: Tensor, dim: int) -> Tensor:
        length = x.shape[dim]
        return exchange(x, lambda x: self.own(x, dim), lambda gradient: self.joined(gradient, dim, length))

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors. Without gradients."""
        return self.all_reduce(x.clone(memory_format=torch.contiguous_format))

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """Return the sum, or the largest, of the ranks' tensors. Without gradients; x is overwritten."""
        import torch.distributed as dist

        dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, (size, *shape of x). Without gradients."""
        out = x.new_empty(self.size, *x.shape)
        gather_into(out.view(-1), x.contiguous().view(-1), self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return entry `rank` of the sum over ranks of tensors (size, ...). Without gradients."""
        import torch.distributed as dist

        out = torch.empty_like(x[0])
        # torch 2.13 has a new name for it
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(out.view(-1), x.contiguous().view(-1), group=self.group)
        return out

    def joined(self, x: Tensor, dim: int, length: int) -> Tensor:
        """Return the parts of all ranks, joined. Without gradients."""
        sizes = [last - first for first, last in (bounds(length, rank, self.size) for rank in range(self.size))]
        out = self.all_gather(_pad(x, dim, max(sizes)))
        return torch.cat([out[rank].narrow(dim, 0, n) for rank, n in enumerate(sizes)], dim=dim)

    def summed_part(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of the sum over ranks. Without gradients."""
        ranges = [bounds(x.shape[dim], rank, self.size) for rank in range(self.size)]
        most = max(last - first for first, last in ranges)
        stacked = torch.stack([_pad(x.narrow(dim, first, last - first), dim, most) for first, last in ranges])
        first, last = ranges[self.rank]
        return self.reduce_scatter(stacked).narrow(dim, 0, last - first)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part. Without gradients."""
        first, last = self.bounds(x.shape[dim])
        return x.narrow(dim, first, last - first).contiguous()


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    missing = length - x.shape[dim]
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, missing)) if missing else x


class _Exchange(torch.autograd.Function):
    """Apply one function in the forward pass, and its partner to the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Function, partner: Function) -> Tensor:
        ctx.partner = partner
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.partner(gradient), None, None


def exchange(x: Tensor, function: Function, partner: Function) -> Tensor:
    """Return `function(x)`; the gradient of x is `partner` of the gradient of the result."""
    out: Tensor = _Exchange.apply(x, function, partner)
    return out
