"""FSDP2: each rank holds 1/N of each tensor of weights, gradient and optimizer state.

    torchrun --nproc-per-node 8 -m glassformer train RUN.toml --set machine.parallel=fsdp

Blocks are gathered when they are needed, one at a time. The model knows nothing of this: it is wrapped from outside.

Every rank computes 1/N of the sequences of a step. A loss is a sum over targets divided by the targets of all ranks, so
N ranks compute what one does, up to the order of sums. Dropout is seeded by (seed, step, rank): nothing per rank needs
storing.

Checkpoints are those of a single process: complete tensors, gathered one by one and written by rank 0. So any number of
ranks can resume them, and `gf.load` reads them. The cost: the host memory of rank 0 holds weights and optimizer state
once when writing, and that of every rank when building and resuming.

Limits. FSDP gathers in float32 and computes under autocast, as one process does: bf16 does not halve the traffic.
Muon gathers its complete matrices for its step; every rank then orthogonalizes all of them. Sampling under FSDP gathers
a copy of the model on rank 0: `loop.sample_every = 0` where that does not fit. Under FSDP an expert that no token of
any rank chose has a gradient of zero, not none, so its weights still decay. The balance loss of a mixture of experts is
that of each rank's sequences.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from glassformer.model import Model, build
from glassformer.model.moe import MoE
from glassformer.training.distributed.group import Function
from glassformer.training.distributed.replicate import Replicated, Root
from glassformer.training.optimizers import Optimizer


class Sharded(Replicated):
    """FSDP2: each tensor is sharded along its first dimension, and rank r holds shard r."""

    sharded = True
    root: Any

    def wrap(self, model: Model, function: Function, compiled: bool) -> Function:
        """In this order: compile each block, shard each block, shard the rest."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        blocks = [block for stack in _stacks(model) for block in stack.blocks]
        for module in model.modules():
            if isinstance(module, MoE):
                module.register_forward_hook(_reach_all_experts)
        if compiled:  # a block is compiled once per layer, because the layer number is a constant
            dynamo: Any = torch._dynamo.config
            dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * len(blocks))
        for block in blocks:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        # the rest is resharded after a forward pass as well: outside of one, parameters are always sharded
        self.root = fully_shard(Root(model), mesh=mesh, reshard_after_forward=True)
        return lambda model, *given: self.root(function, *given)

    def adopt(self, optimizer: Optimizer) -> None:
        for member, _ in optimizer.members:
            if not isinstance(member, torch.optim.AdamW):  # AdamW works element by element
                _Whole(self, member)

    def run(self, function: Function, model: Model, *given: Any) -> Any:
        return self.root(function, *given)

    @contextlib.contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        self.root.set_requires_gradient_sync(not more)
        yield

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]

    def whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, tensor in tensors.items():
            full = self.full(tensor.detach())
            if self.is_main:
                out[name] = full.cpu()
        return out

    def spread(self, tensors: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
        parameters = dict(model.named_parameters())
        out = {}
        for name, tensor in tensors.items():
            like = parameters.get(name, parameters.get(name.rpartition("/")[0]))
            fits = like is not None and tensor.shape == like.shape and tensor.dim() > 0
            out[name] = self.cut(tensor, like) if fits else tensor
        return out

    def cut(self, tensor: Tensor, like: Any) -> Tensor:
        """Return this rank's shard of a tensor that every rank has completely."""
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(self.device), like.device_mesh, like.placements, src_data_rank=None)

    def whole_model(self, model: Model) -> Model | None:
        weights = self.whole(dict(model.named_parameters()))
        if not self.is_main:
            return None
        copy = build(model.config, device=self.device)
        copy.load_state_dict(weights)
        return copy


class _Whole:
    """Hooks of an optimizer that needs complete matrices: gathered before its step, sharded again after it."""

    def __init__(self, group: Sharded, optimizer: torch.optim.Optimizer):
        self.group = group
        self.held: list[list[Any]] = []
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        full = self.group.full
        self.held = [group["params"] for group in optimizer.param_groups]
        for group, pieces in zip(optimizer.param_groups, self.held, strict=True):
            group["params"] = []
            for piece in pieces:
                matrix = full(piece.detach()).clone()
                matrix.grad = None if piece.grad is None else full(piece.grad)
                optimizer.state[matrix] = {k: full(v) for k, v in optimizer.state.pop(piece, {}).items()}
                group["params"].append(matrix)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, pieces in zip(optimizer.param_groups, self.held, strict=True):
            for matrix, piece in zip(group["params"], pieces, strict=True):
                piece.copy_(self.group.cut(matrix, piece))
                state = optimizer.state.pop(matrix)
                for key, value in state.items():
                    same = isinstance(value, Tensor) and value.shape == matrix.shape
                    optimizer.state[piece][key] = self.group.cut(value, piece) if same else value
            group["params"] = pieces
        self.held = []


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
