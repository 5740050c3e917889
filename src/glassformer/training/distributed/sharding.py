"""FSDP2: each rank holds 1/N of each tensor of weights, gradient and optimizer state.

    torchrun --nproc-per-node 8 -m glassformer train RUN.toml --set machine.parallel=fsdp

Blocks are gathered when they are needed, one at a time. The model knows nothing of this: it is wrapped from outside.

Every rank computes 1/N of the sequences of a step. A loss is a sum over targets divided by the targets of all ranks, so
N ranks compute what one does, up to the order of sums. Dropout is seeded by (seed, step, rank): nothing per rank needs
storing.

No rank ever holds the whole model. It is built without memory (the meta device), sharded, and then filled: fresh
weights are drawn one tensor at a time, with the numbers that a single process draws; those of a model folder are read
one at a time. Checkpoints are those of a single process (`pieces`): any number of ranks resumes them, and `gf.load`
reads them. With [lora], frozen weights and adapters are sharded alike, and only adapters have gradients.

With `machine.replicate` there are several copies of the sharded model (HSDP): weights are gathered within a copy, and
gradients are summed over all of them. With `machine.gather = "bfloat16"` weights travel in half the bytes.

Where a tensor has one shard, as with `machine.tensor` equal to the number of ranks, there is nothing to gather, and
blocks are not wrapped (`is_wrapped`): the hooks of fully_shard alone cost a GPU that waits for its host a tenth of a
step.

Limits. Sampling under FSDP gathers a copy of the model on rank 0: `loop.sample_every = 0` where that does not fit.
Under FSDP an expert that no token of any rank chose has a gradient of zero, not none, so its weights still decay. The
balance loss of a mixture of experts is that of each rank's sequences.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glassformer.config.placement import cut_dimension
from glassformer.model import Model, build
from glassformer.model.adapters import merged_state
from glassformer.model.moe import MoE
from glassformer.training.checkpoint import copy_stored
from glassformer.training.distributed.context import ContextParallel
from glassformer.training.distributed.exchange import Ranks
from glassformer.training.distributed.group import Function
from glassformer.training.distributed.pieces import Box, box_of, piece_of, write
from glassformer.training.distributed.replicate import Replicated, Root
from glassformer.training.distributed.tensor import Division
from glassformer.training.objective import Batch
from glassformer.training.optimizers import clear_held_rows
from glassformer.weights.tensors import Stored, release_all


class Sharded(Replicated):
    """FSDP2: each tensor is sharded along its first dimension, and rank r holds shard r."""

    sharded = True
    root: Any
    division: Division | None = None
    """With tensor parallelism: how blocks are divided. Their parts are then sharded."""

    context: ContextParallel | None = None
    """With context parallelism: how sequences are divided."""
    forced: tuple[str, ...] = ()
    """Dimensions of the mesh that are used though they have one rank, so that one device runs their code."""

    @property
    def is_wrapped(self) -> bool:
        """True if fully_shard gathers weights and reduces gradients; False if there is one shard and no copy of it.

        With `machine.gather = "bfloat16"` it is needed all the same: it frees the bfloat16 weights of a block after
        use, where autocast would keep those of the whole model.
        """
        wanted = self.machine.gather == "bfloat16" or "shard" in self.forced or "replicate" in self.forced
        return wanted or self.world > self.machine.tensor

    def make_mesh(self, init_device_mesh: Callable[..., Any], model: Model) -> Any:
        """Return the ranks over which this rank's tensors are sharded, with copies in the first dimension if any."""
        copies, parts = self.machine.replicate, self.machine.tensor
        sizes = {"replicate": copies, "shard": self.world // (copies * parts), "tensor": parts}
        made = {name: n for name, n in sizes.items() if n > 1 or name == "shard" or name in self.forced}
        mesh = init_device_mesh(self.device.type, tuple(made.values()), mesh_dim_names=tuple(made))
        if self.machine.context > 1 or "context" in self.forced:
            self.context = self.join_sequences(init_device_mesh)
            self.context.install(model)
        if "tensor" in made:
            self.division = Division(Ranks(mesh.get_group("tensor"), self.rank % parts, parts), model.config.vocab_size)
            made.pop("tensor")
            return mesh[tuple(made)]
        return mesh

    def join_sequences(self, init_device_mesh: Callable[..., Any]) -> ContextParallel:
        """Connect the ranks that divide sequences. They are neighbours among those over which tensors are sharded."""
        n, parts = self.machine.context, self.machine.tensor
        names = ("sequences", "context", "tensor")
        mesh = init_device_mesh(self.device.type, (self.world // (n * parts), n, parts), mesh_dim_names=names)
        return ContextParallel(Ranks(mesh.get_group("context"), self.rank // parts % n, n))

    def wrap(self, model: Model, function: Function) -> Function:
        """Divide blocks if asked to, then shard each block, then the rest."""
        from torch.distributed.device_mesh import init_device_mesh

        mesh = self.make_mesh(init_device_mesh, model)
        self.owners = mesh.get_group("shard")
        if self.division is not None:
            self.division.divide(model)
        self.root = self.shard(model, mesh) if self.is_wrapped else Root(model)
        return lambda model, *given: self.run(function, model, *given)

    def shard(self, model: Model, mesh: Any) -> Any:
        """Return the module that computes any function of a model whose parameters are sharded over the mesh."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # inputs keep their dtype: the residual stream has that of the embedding, which is gathered like all weights
        narrow = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
        policy = MixedPrecisionPolicy(**(narrow if self.machine.gather == "bfloat16" else {}))  # type: ignore[arg-type]
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
        blocks = [block for stack in _stacks(model) for block in stack.blocks]
        for module in model.modules():
            if isinstance(module, MoE):
                module.register_forward_hook(_reach_all_experts)
        for block in blocks:
            fully_shard(block, **options)
        # the rest is resharded after a forward pass as well: outside of one, parameters are always sharded
        return fully_shard(Root(model), **options)

    def run(self, function: Function, model: Model, *given: Any) -> Any:
        if self.context is not None and given and isinstance(given[0], Batch):
            function = self.context.parted(function)
        return self.root(function, *given)

    @contextlib.contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        if self.is_wrapped:
            self.root.set_requires_gradient_sync(not more)
        yield

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]

    @torch.no_grad()
    def fill(self, model: Model, values: Iterable[tuple[str, Tensor]]) -> None:
        """Every rank is given whole tensors, one at a time, and keeps its part."""
        model.to_empty(device=self.device)
        for buffer in model.buffers():
            buffer.zero_()
        targets = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, value in values:
            local = self.local(targets[name])
            local.copy_(value[self.box(name, targets[name])])
            del value
            release_all()

    def hold(self, tensors: dict[str, Any], copy: bool) -> dict[str, Any]:
        """On several hosts, tensors are gathered while they are written, and there is no copy."""
        copy = copy and self.one_host
        pieces = {name: piece_of(t, 0 if self.is_part(name, t) else self.rank, copy) for name, t in tensors.items()}
        if self.division is None:
            return pieces
        first = self.division.ranks.rank == 0
        return {
            name: replace(
                piece,
                shape=self.whole_shape(name, piece.source),
                box=self.box(name, piece.source),
                is_written=piece.is_written and (first or cut_dimension(_parameter(name)) is not None),
            )
            for name, piece in pieces.items()
        }

    def is_part(self, name: str, tensor: Tensor) -> bool:
        """Return whether each rank has its own part of a tensor that is not sharded, and so writes it."""
        divided = not self.is_wrapped and self.division is not None
        return divided and tensor.dim() > 0 and cut_dimension(_parameter(name)) is not None

    def whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of the complete tensor of a parameter, or of a state of it."""
        if self.division is None or tensor.dim() == 0:
            return tuple(tensor.shape)
        return self.division.whole_shape(_parameter(name), tensor.shape)

    def box(self, name: str, tensor: Tensor) -> Box:
        """Return which part of the complete tensor this rank holds."""
        inner = box_of(tensor)
        if self.division is None or tensor.dim() == 0:
            return inner
        part = self.division.part(_parameter(name), self.whole_shape(name, tensor))
        if part is None:
            return inner
        return tuple(slice(p.start + b.start, p.start + b.stop) for p, b in zip(part, inner, strict=True))

    def whole_tensor(self, name: str, tensor: Tensor) -> Tensor:
        full = self.full(tensor)
        return full if self.division is None or full.dim() == 0 else self.division.join(_parameter(name), full)

    @torch.no_grad()
    def gradient_norm(self, model: Model) -> Tensor:
        if self.division is None:
            return self.full(super().gradient_norm(model))
        clear_held_rows(model.parameters())
        gradients = [(name, self.local(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
        self.division.sum_gradients(gradients)
        norms = (
            torch.nn.utils.get_total_norm([g for name, g in gradients if (cut_dimension(name) is None) == whole])
            for whole in (False, True)
        )
        squares = torch.stack([norm.to(self.device, torch.float64) for norm in norms]).square()
        self.dist.all_reduce(squares, group=self.owners)
        self.division.ranks.all_reduce(squares[:1])
        return squares.sum().sqrt().float()

    def write(self, tensors: dict[str, Any], path: Path) -> None:
        write(path, tensors, self)

    def read(self, name: str, stored: Stored, like: Any) -> Tensor:
        if like is None or stored.shape != self.whole_shape(name, like):
            return copy_stored(stored)
        if not _is_sharded(like):
            return copy_stored(stored, self.box(name, like))
        from torch.distributed.tensor import DTensor

        local = copy_stored(stored, self.box(name, like)).to(self.device)
        grid, kinds = like.device_mesh, like.placements
        return DTensor.from_local(local, grid, kinds, run_check=False, shape=like.shape, stride=like.stride())

    def whole_model(self, model: Model) -> Model | None:
        weights = {}
        for name, parameter in model.named_parameters():
            full = self.whole_tensor(name, parameter.detach())
            if self.is_main:
                weights[name] = full.cpu()
        if not self.is_main:
            return None
        copy = build(model.config, device=self.device)
        copy.load_state_dict(merged_state(model, weights))
        return copy


def _parameter(name: str) -> str:
    """Return the parameter of a tensor of a checkpoint: NAME of `optimizer/NAME/exp_avg`, `weights/NAME` and NAME."""
    return name.removeprefix("optimizer/").removeprefix("weights/").partition("/")[0]


def _is_sharded(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _stacks(model: Model) -> list[Any]:
    return [part for name in ("encoder", "decoder") if (part := getattr(model, name, None)) is not None]


def _reach_all_experts(module: MoE, given: Any, out: Tensor) -> Tensor:
    """Nothing is added, but every expert gets a gradient: ranks whose tokens chose others must still agree on which."""
    for parameter in module.experts.parameters():
        out = out + 0.0 * parameter.view(-1)[0].to(out.dtype)
    return out
