"""Training by several processes: DDP or FSDP2 under torchrun. The only file that uses `torch.distributed`.

    torchrun --nproc-per-node 8 -m glassformer train RUN.toml --set machine.parallel=fsdp

`connect` returns the `Group` of a process, and the loop calls its methods. The model knows nothing of this: it is
wrapped from outside.

    Replicated (ddp)   every rank holds the model; gradients are averaged while the backward pass runs
    Sharded (fsdp)     every rank holds 1/N of each tensor of weights, gradient and optimizer; blocks are gathered when
                       they are needed, one at a time

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
that of each rank's sequences. torchrun notices a dead process at once, and a process that hangs after `TIMEOUT`.
"""

import contextlib
import datetime
import gc
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from glassformer.config import ConfigError
from glassformer.model import Model, build
from glassformer.model.layers import MoE
from glassformer.training.distributed.group import Function, Group, T, local_rank
from glassformer.training.optimizers import Optimizer
from glassformer.training.run import Run

TIMEOUT = datetime.timedelta(minutes=30)
"""How long a rank waits for the others: rank 0 may be counting n-grams or writing a large checkpoint meanwhile."""


def connect(run: Run) -> Group:
    """Join the processes of torchrun and return their group. It can be called again."""
    import torch.distributed as dist

    cuda = run.machine.device != "cpu" and torch.cuda.is_available()
    if cuda:
        local, devices = local_rank(), torch.cuda.device_count()
        if local >= devices:
            raise ConfigError(
                f"this machine has {devices} CUDA devices, which is too few for process {local + 1}: "
                f"use --nproc-per-node {devices}, or machine.device='cpu'."
            )
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    kind = Sharded if run.machine.parallel == "fsdp" else Replicated
    return kind(torch.device("cuda" if cuda else "cpu"))


class Root(nn.Module):
    """A module whose forward calls any function of the model, because DDP and FSDP wrap the forward of a module."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, function: Function, *given: Any) -> Any:
        return function(self.model, *given)


class Replicated(Group):
    """DDP: the same weights on every rank."""

    ddp: nn.parallel.DistributedDataParallel

    def __init__(self, device: torch.device):
        import torch.distributed as dist

        self.dist = dist
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def wrap(self, model: Model, function: Function, compiled: bool) -> Function:
        # the loss does not use a pooler, and the tokens of a rank may leave an expert out
        idle = getattr(model.config, "pooler", False) or any(isinstance(m, MoE) for m in model.modules())
        ddp = nn.parallel.DistributedDataParallel(
            Root(model), gradient_as_bucket_view=True, find_unused_parameters=idle
        )
        self.ddp = ddp
        inner = torch.compile(function) if compiled else function
        return lambda model, *given: ddp(inner, *given)

    def accumulating(self, more: bool) -> contextlib.AbstractContextManager[Any]:
        return self.ddp.no_sync() if more else contextlib.nullcontext()

    def totals(self, *numbers: float) -> tuple[float, ...]:
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self.dist.all_reduce(sums)
        return tuple(sums.tolist())

    def gather(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world
        self.dist.all_gather_object(values, value)
        return values

    def agree(self, value: T) -> T:
        values = [value]
        self.dist.broadcast_object_list(values, src=0)
        return values[0]

    def on_main(self, work: Callable[[], T]) -> T:
        result: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = work()
            except Exception as raised:
                error = raised
        done, failed = self.agree((result, error))
        if failed is not None:
            raise error or failed  # the error of rank 0 itself has its traceback
        return cast(T, done)

    def reseed(self, seed: int, step: int) -> None:
        digest = hashlib.sha256(f"{seed} {step} {self.rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little"))

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[Callable[[], bool]]:
        """Leave signals as they are: a rank that saw one a step later than the others would wait for them forever."""
        yield lambda: False

    def close(self) -> None:
        self.totals(0)  # no rank leaves while another still communicates
        for name in ("ddp", "root"):
            self.__dict__.pop(name, None)
        gc.collect()  # references to the group keep its threads alive, and those may outlive Python
        self.dist.destroy_process_group()


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
