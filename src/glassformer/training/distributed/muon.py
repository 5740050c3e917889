"""Muon on several ranks: each matrix is orthogonalized once, by the rank that owns it.

Matrix j of a shape belongs to rank j mod N (of each copy of the model, if there are several). Momentum and update are
elementwise, so each rank computes them for what it holds. Only what is orthogonalized travels, in bfloat16:

    replicated (ddp)    the owner has the whole matrix; the results are gathered by all
    sharded (fsdp)      every rank sends its rows of matrix j to the owner (all-to-all), and gets the rows of the result
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from glassformer.training.muon import Muon, orthogonalize_all

if TYPE_CHECKING:
    from glassformer.training.distributed.replicate import Replicated

Stacks = dict[torch.Size, Tensor]
"""(n, rows, columns) tensors by the shape of the whole matrices; of sharded ones, the rows of this rank."""


class Owners:
    """Orthogonalizes matrices that all ranks of a group hold, or of which each holds some rows."""

    def __init__(self, optimizer: Muon, group: "Replicated"):
        self.group, self.ranks = group, group.owners
        self.rank, self.world = group.dist.get_rank(self.ranks), group.dist.get_world_size(self.ranks)
        optimizer.local = group.local
        optimizer.orthogonalize = self.sharded if group.sharded else self.replicated

    def replicated(self, stacks: Stacks) -> Stacks:
        done = orthogonalize_all({shape: stack[self.rank :: self.world] for shape, stack in stacks.items()})
        out = {}
        for shape, stack in stacks.items():
            most = math.ceil(len(stack) / self.world)
            mine = torch.zeros(most, *shape, dtype=done[shape].dtype, device=stack.device)
            mine[: len(done[shape])] = done[shape]
            found = torch.empty(self.world, *mine.shape, dtype=mine.dtype, device=stack.device)
            self.group.dist.all_gather_into_tensor(_bytes(found), _bytes(mine), group=self.ranks)
            out[shape] = found.transpose(0, 1).reshape(-1, *shape)[: len(stack)]  # matrix j: row j // N of rank j mod N
        return out

    def sharded(self, stacks: Stacks) -> Stacks:
        whole = {shape: self.collect(shape, stack) for shape, stack in stacks.items()}
        done = orthogonalize_all(whole)
        return {shape: self.give_back(shape, done[shape], len(stack)) for shape, stack in stacks.items()}

    def rows(self, shape: torch.Size) -> list[int]:
        """Return how many rows of a matrix each rank holds."""
        size = math.ceil(shape[0] / self.world)
        return [max(0, min(size, shape[0] - rank * size)) for rank in range(self.world)]

    def owned(self, count: int) -> list[int]:
        """Return how many of `count` matrices each rank owns."""
        return [len(range(rank, count, self.world)) for rank in range(self.world)]

    def collect(self, shape: torch.Size, stack: Tensor) -> Tensor:
        """Send rows to the owners; return the whole matrices that this rank owns."""
        rows, owned = self.rows(shape), self.owned(len(stack))
        assert stack.shape[1] == rows[self.rank]
        sent = [stack[owner :: self.world] for owner in range(self.world)]
        parts = self.exchange(sent, [(owned[self.rank], n, shape[1]) for n in rows])
        return torch.cat(parts, dim=1)

    def give_back(self, shape: torch.Size, done: Tensor, count: int) -> Tensor:
        """Send the rows of the results to the ranks that hold them; return those of this rank, of all matrices."""
        rows, owned = self.rows(shape), self.owned(count)
        parts = self.exchange(list(done.split(rows, dim=1)), [(n, rows[self.rank], shape[1]) for n in owned])
        out = torch.empty(count, rows[self.rank], shape[1], dtype=done.dtype, device=done.device)
        for owner, part in enumerate(parts):
            out[owner :: self.world] = part
        return out

    def exchange(self, sent: list[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Send one tensor to each rank, and return the tensors of these shapes that they sent."""
        flat = torch.cat([_bytes(part.contiguous()) for part in sent])
        width = sent[0].element_size()
        sizes = [width * math.prod(shape) for shape in shapes]
        got = torch.empty(sum(sizes), dtype=torch.uint8, device=flat.device)
        self.group.dist.all_to_all_single(got, flat, sizes, [part.numel() * width for part in sent], group=self.ranks)
        dtype: Any = sent[0].dtype
        return [part.clone().view(dtype).view(shape) for part, shape in zip(got.split(sizes), shapes, strict=True)]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: gloo does not know every dtype."""
    return tensor.view(-1).view(torch.uint8)
