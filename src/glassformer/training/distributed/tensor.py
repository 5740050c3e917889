"""Tensor parallelism: T ranks divide heads, hidden units, vocabulary and, between them, the positions of a sequence.

    attention, feed-forward   a rank holds the rows of q, k, v, gate and up that belong to its heads and units, and the
                              columns of o and down. It reads the whole sequence, and computes its part of a sum
    everything between        norms, dropout and the residual stream: a rank has its part of the positions (sequence
                              parallelism). Parts are gathered before attention and feed-forward; after them the sums
                              are added up, and each rank keeps its part. The bytes are those of one all-reduce
    embedding, head, loss     each rank has the rows of its token ids (`vocabulary`)
    experts                   the router reads the whole sequence on every rank; each expert is divided as above

All T ranks read the same sequences. It is applied from outside: parameters are replaced by their part before they get
memory, and hooks exchange what has to be. Parameters that are not cut, but see only some heads, positions or ids, get
the sum of the ranks' gradients (`summed`).

`config.placement` says how each parameter is cut. What cannot be cut is refused before anything is built.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.config import ConfigError
from glassformer.config.placement import cut_dimension, indivisible, is_of_vocabulary, part_not_supported
from glassformer.model import Model
from glassformer.model.block import Block, Stack
from glassformer.model.layers import Dense as DenseModule
from glassformer.model.layers import Gated as GatedModule
from glassformer.model.moe import MoE
from glassformer.training.checkpoint import random_state, set_random_state
from glassformer.training.distributed.exchange import Ranks
from glassformer.training.distributed.vocabulary import Vocabulary
from glassformer.training.optimizers import HELD_ROWS
from glassformer.training.run import Run

SEQUENCE = 1
"""The dimension of positions in (B,T,D)."""


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
    if run.machine.products == "float8":
        problem = "machine.products='float8'"
    if problem is not None:
        raise ConfigError(f"machine.tensor={size} does not support {problem}: use machine.tensor=1.")


class Division:
    """The ranks among which a model is divided, and what this process has of it."""

    def __init__(self, ranks: Ranks, vocab_size: int):
        self.ranks, self.vocab_size = ranks, vocab_size
        self.length = 0
        """Positions of the sequences in the present forward pass."""
        self.summed: set[str] = set()
        """Names of parameters on every rank whose gradients are added up."""
        self.has_dropout = False
        self.held: list[dict[str, Tensor]] = []
        """The state of the random generators outside of the blocks, while blocks draw numbers of their own."""

    def part(self, name: str, shape: Iterable[int]) -> tuple[slice, ...] | None:
        """Return the part of a whole tensor that this rank holds; None if it holds all of it."""
        sizes, dimension = list(shape), cut_dimension(name)
        if dimension is None:
            return None
        out = [slice(0, n) for n in sizes]
        out[dimension] = slice(*self.ranks.bounds(sizes[dimension]))
        return tuple(out)

    def whole_shape(self, name: str, shape: Iterable[int]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, of which a rank holds a part of this shape."""
        sizes, dimension = list(shape), cut_dimension(name)
        if dimension is not None:
            # all other numbers are multiples of the number of ranks (`check_tensor`)
            sizes[dimension] = self.vocab_size if is_of_vocabulary(name) else sizes[dimension] * self.ranks.size
        return tuple(sizes)

    def divide(self, model: Model) -> None:
        """Replace parameters by their parts, and add the exchanges."""
        held = dict(getattr(model, HELD_ROWS, {}))
        for name, parameter in list(model.named_parameters()):
            part = self.part(name, parameter.shape)
            if part is not None:
                if name in held:  # the first of them, counted from the first row of this rank
                    held[name] -= part[0].start
                owner, _, leaf = name.rpartition(".")
                shape = [p.stop - p.start for p in part]
                cut = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
                setattr(model.get_submodule(owner), leaf, cut)
        setattr(model, HELD_ROWS, held)
        self.has_dropout = model.config.dropout > 0
        Vocabulary(self.ranks, self.vocab_size).divide(model)
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            self._divide_stack(stack)
        self.summed = {name for name in _seen_in_part(model) if cut_dimension(name) is None}

    def _divide_stack(self, stack: Stack) -> None:
        stack.register_forward_hook(self._leave)
        for block in (module for module in stack.modules() if isinstance(module, Block)):
            block.register_forward_pre_hook(self._enter)
            block.attention.n_heads //= self.ranks.size
            block.attention.n_kv_heads //= self.ranks.size
            self._divide_sum(block.attention, block.attention.o)
            inner = block.feedforward
            if isinstance(inner, MoE):
                inner.register_forward_pre_hook(self._join)
                inner.register_forward_hook(lambda _, __, out: self.ranks.part(out, SEQUENCE))
                for expert in (*inner.experts, *(() if inner.shared is None else (inner.shared,))):
                    assert isinstance(expert, DenseModule | GatedModule)
                    self._divide_sum(expert, expert.down, whole=True)
            elif inner is not None:
                self._divide_sum(inner, inner.down)

    def _enter(self, block: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the first layer, keep this rank's positions, and draw other numbers for dropout than other ranks."""
        x, _, layer, *_ = given
        if layer > 0:
            return given
        self.length = x.shape[SEQUENCE]
        if block.training and self.has_dropout:
            seed = int(torch.randint(2**62, ()))
            self.held.append(random_state(x.device))
            torch.manual_seed(seed + self.ranks.rank)
        return (self.ranks.part(x, SEQUENCE), *given[1:])

    def _leave(self, stack: nn.Module, given: tuple[Any, ...], x: Tensor) -> Tensor:
        """After the last layer and the final norm, all ranks get all positions and draw the same numbers again."""
        if self.held:
            set_random_state(self.held.pop(), x.device)
        return self.ranks.join(x, SEQUENCE, self.length)

    def _join(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.ranks.join(given[0], SEQUENCE, self.length), *given[1:])

    def _divide_sum(self, module: nn.Module, last: nn.Linear, whole: bool = False) -> None:
        """All ranks give their parts of the sum that a module is. The bias of `last` is added to that sum.

        A module reads and returns parts of the positions; with `whole`, all ranks have all of what it reads.
        """

        def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            x = given[0]
            return (self.ranks.copy(x) if whole else self.ranks.gather(x, SEQUENCE, self.length), *given[1:])

        def after(_: nn.Module, __: Any, out: Tensor) -> Tensor:
            out = self.ranks.add(out) if whole else self.ranks.scatter(out, SEQUENCE)
            return out if last.bias is None else out + last.bias.to(out.dtype)

        own: Any = last
        own.forward = lambda x: F.linear(x, last.weight)
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def sum_gradients(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Add up the gradients of parameters that see only a part on each rank, in one exchange for each dtype."""
        chosen: dict[torch.dtype, list[Tensor]] = {}
        for name, gradient in named:
            if name in self.summed and gradient.numel():
                chosen.setdefault(gradient.dtype, []).append(gradient)
        for gradients in chosen.values():
            flat = self.ranks.all_reduce(torch.cat([gradient.flatten() for gradient in gradients]))
            for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def join(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor of which each rank holds a part. All ranks must call it."""
        dimension = cut_dimension(name)
        if dimension is None:
            return tensor
        return self.ranks.joined(tensor, dimension, self.whole_shape(name, tensor.shape)[dimension])


def _seen_in_part(model: Model) -> Iterable[str]:
    """Yield the names of parameters that see some positions, heads or ids on each rank; cut ones are among them.

    Embeddings and positions are computed for all positions on every rank. So are experts and their router.
    """
    for name, module in model.named_modules():
        if isinstance(module, Block):
            for inner, _ in module.named_parameters():
                if not (inner.startswith("feedforward.") and isinstance(module.feedforward, MoE)):
                    yield f"{name}.{inner}"
        elif isinstance(module, Stack) and module.norm is not None:
            yield from (f"{name}.norm.{inner}" for inner, _ in module.norm.named_parameters())
    if model.head is not None:
        yield from (f"head.{inner}" for inner, _ in model.head.named_parameters())
