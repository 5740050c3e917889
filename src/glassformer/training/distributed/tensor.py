"""Tensor parallelism: the heads of attention and the hidden units of feed-forwards are divided among T ranks.

Every rank holds the rows of q, k, v, gate and up that belong to its heads and units, and the columns of o and down. It
computes its part of the sum that o and down are, and the parts are added (one all-reduce for attention and one for the
feed-forward, and the same again in the backward pass). Everything else (norms, embedding, head, residual stream) is the
same on all T ranks, and they read the same sequences. It is applied from outside: parameters are replaced by their part
before they get memory, and hooks add the parts up.

`config.placement` says how each parameter is cut. What cannot be cut is refused before anything is built.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from glassformer.config import ConfigError
from glassformer.config.placement import cut_dimension, indivisible, part_not_supported
from glassformer.model import Model
from glassformer.model.attention import Attention
from glassformer.model.layers import Dense as DenseModule
from glassformer.model.layers import Gated as GatedModule
from glassformer.training.checkpoint import random_state, set_random_state
from glassformer.training.run import Run

SUMMED = ("*.attention.q_norm.*", "*.attention.k_norm.*")
"""Parameters on every rank that see the heads of that rank only: their gradients are added up."""


def check_tensor(run: Run) -> None:
    """Refuse a run whose model cannot be divided among machine.tensor ranks."""
    size = run.machine.tensor
    if (number := indivisible(run.model, size)) is not None:
        raise ConfigError(f"machine.tensor={size} does not divide the {number} of the model: use a number that does.")
    problem = part_not_supported(run.model)
    if run.lora is not None:
        problem = "adapters ([lora])"
    if run.optim.kind == "muon":
        problem = "the optimizer muon"
    if problem is not None:
        raise ConfigError(f"machine.tensor={size} does not support {problem}: use machine.tensor=1.")


@dataclasses.dataclass(frozen=True)
class Division:
    """The ranks among which tensors are divided, and which of them this process is."""

    group: Any
    rank: int
    size: int

    def part(self, name: str, shape: Iterable[int]) -> tuple[slice, ...] | None:
        """Return the part of a whole tensor that this rank holds; None if it holds all of it."""
        sizes, dimension = list(shape), cut_dimension(name)
        if dimension is None:
            return None
        length = sizes[dimension] // self.size
        out = [slice(0, n) for n in sizes]
        out[dimension] = slice(self.rank * length, (self.rank + 1) * length)
        return tuple(out)

    def whole_shape(self, name: str, shape: Iterable[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, of which a rank holds a part of this shape."""
        sizes, dimension = list(shape), cut_dimension(name)
        if dimension is not None:
            sizes[dimension] *= self.size
        return tuple(sizes)

    def divide(self, model: Model) -> None:
        """Replace parameters by their parts, and let the parts of sums be added up."""
        for name, parameter in list(model.named_parameters()):
            part = self.part(name, parameter.shape)
            if part is not None:
                owner, _, leaf = name.rpartition(".")
                shape = [p.stop - p.start for p in part]
                cut = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
                setattr(model.get_submodule(owner), leaf, cut)
        for module in model.modules():
            if isinstance(module, Attention):
                module.n_heads //= self.size
                module.n_kv_heads //= self.size
                self._hook(module, module.o)
                if module.dropout > 0:
                    self._draw_own_numbers(module)
            elif isinstance(module, DenseModule | GatedModule):
                self._hook(module, module.down)

    def _hook(self, module: nn.Module, last: nn.Linear) -> None:
        """The input of a module goes to all ranks; its output is the sum of theirs. `last` adds its bias once."""

        def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_Copy.apply(given[0], self.group), *given[1:])

        def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            if last.bias is None:
                return _Sum.apply(out, self.group)
            bias = last.bias.to(out.dtype)
            return _Sum.apply(out - bias, self.group) + bias

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def _draw_own_numbers(self, attention: nn.Module) -> None:
        """Let dropout on the pattern draw other numbers on each rank, whose heads are others.

        Dropout on the residual stream draws the same ones: outside of attention, the generators of the ranks agree.
        """
        held: list[dict[str, Tensor]] = []

        def before(module: nn.Module, given: tuple[Any, ...]) -> None:
            if module.training:
                seed = int(torch.randint(2**62, ()))
                held.append(random_state(given[0].device))
                torch.manual_seed(seed + self.rank)

        def after(module: nn.Module, given: tuple[Any, ...], _: Any) -> None:
            if module.training:
                set_random_state(held.pop(), given[0].device)

        attention.register_forward_pre_hook(before)
        attention.register_forward_hook(after)

    def sum_gradients(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Add up the gradients of parameters that see the heads of one rank only."""
        import torch.distributed as dist

        for name, gradient in named:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in SUMMED):
                dist.all_reduce(gradient, group=self.group)

    def join(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor of which each rank holds a part. All ranks must call it."""
        import torch.distributed as dist

        dimension = cut_dimension(name)
        if dimension is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=dimension)


class _Copy(torch.autograd.Function):
    """Forward: x. Backward: the sum of the gradients of all ranks, each of which used x for its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        import torch.distributed as dist

        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Forward: the sum of the parts of all ranks. Backward: the gradient, which is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        import torch.distributed as dist

        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
