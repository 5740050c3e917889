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

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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
        out: Tensor = _Copy.apply(x, self)
        return out

    def add(self, x: Tensor) -> Tensor:
        out: Tensor = _Add.apply(x, self)
        return out

    def gather(self, x: Tensor, dim: int, length: int) -> Tensor:
        out: Tensor = _Gather.apply(x, dim, length, self)
        return out

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        out: Tensor = _Scatter.apply(x, dim, self)
        return out

    def join(self, x: Tensor, dim: int, length: int) -> Tensor:
        out: Tensor = _Join.apply(x, dim, length, self)
        return out

    def part(self, x: Tensor, dim: int) -> Tensor:
        out: Tensor = _Part.apply(x, dim, self)
        return out

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


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return ranks.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return ranks.joined(x, dim, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks.summed_part(gradient, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.length, ctx.ranks = dim, x.shape[dim], ranks
        return ranks.summed_part(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.joined(gradient, ctx.dim, ctx.length), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.ranks = dim, ranks
        return ranks.joined(x, dim, length)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.ranks.own(gradient, ctx.dim), None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks) -> Tensor:
        ctx.dim, ctx.length, ctx.ranks = dim, x.shape[dim], ranks
        return ranks.own(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.joined(gradient, ctx.dim, ctx.length), None, None
