"""Peak memory of one rank in a training step, of models that fit on no machine at hand, by torch's fake process group.

    python -m glassformer.bench.developer.ranks_memory [--cases small 302M 8B 70B] [--gloo]

The step of rank 0 runs with tensors that have shapes and no data (FakeTensorMode), and with collectives that transfer
nothing. What is alive at its peak is counted by kind (torch's MemTracker): parameters, gradients, optimizer state,
activations, temporary tensors. The count of `glass size plan` is compared with the peak of a step without head and
loss, because it counts no logits.

`--gloo` measures the small case with four real ranks of torchrun as well, in the same way.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from glassformer.bench.commands import in_process, parser
from glassformer.config import ModelConfig, presets
from glassformer.model import DecoderLM, build, cache, context
from glassformer.sizing.plan import device_bytes
from glassformer.training.blocks import recompute_blocks
from glassformer.training.distributed.sharding import Sharded
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss, Machine

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model, a number of ranks, and how they share the work."""

    name: str
    config: ModelConfig
    ranks: int
    batch: int
    """Sequences that the ranks of one group of `tensor` and `context` read together."""
    length: int
    machine: dict[str, Any] = field(default_factory=dict)

    def planned(self) -> float | None:
        """Return the bytes that `glass size plan` counts for this; None for context parallelism, which it does not."""
        if "context" in self.machine:
            return None
        degree, recompute = self.machine.get("tensor", 1), "recompute" in self.machine
        strategy = f"tensor {degree}" if degree > 1 else "sharded"
        width = 2 if "gather" in self.machine else 4
        return device_bytes(self.config, self.ranks, strategy, self.batch, self.length, recompute, width)


def cases() -> dict[str, list[Case]]:
    """Return the cases by name of the model."""
    small = presets.llama_tiny(n_layers=4, d_model=256, n_heads=8, n_kv_heads=4, d_ff=768, vocab_size=1000, max_len=256)
    of_302m = presets.gpt2_medium(vocab_size=1024, max_len=256, dropout=0.0)
    of_8b, of_70b = presets.llama3_8b(), presets.llama2_70b()
    full = {"recompute": "full"}
    narrow = {"gather": "bfloat16"}
    return {
        "small": [
            Case("small", small, 4, 4, 256),
            Case("small", small, 4, 4, 256, narrow),
            Case("small", small, 4, 4, 256, full),
            Case("small", small, 4, 4, 256, {"tensor": 2, **narrow}),
            Case("small", small, 4, 4, 256, {"context": 2, **narrow}),
        ],
        "302M": [Case("302M", of_302m, n, 1, 256, narrow) for n in (2, 4)],
        "8B": [
            Case("8B", of_8b, 8, 1, 8192, {**full, **narrow}),
            Case("8B", of_8b, 8, 1, 8192, {"tensor": 8, **narrow}),
            Case("8B", of_8b, 64, 1, 131072, {"context": 8, **full, **narrow}),
        ],
        "70B": [
            Case("70B", of_70b, 64, 1, 4096, {**full, **narrow}),
            Case("70B", of_70b, 64, 8, 4096, {"tensor": 8, **full, **narrow}),
        ],
    }


class Tracked(Sharded):
    """Ranks of a process group that exists already."""

    def __init__(self, machine: Machine):
        import torch.distributed as dist

        self.dist, self.machine, self.device = dist, machine, torch.device("cpu")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.parts, self.owners = machine.tensor * machine.context, None

    def make_mesh(self, *given: Any) -> Any:
        """Meshes hold ranks in tensors, which must have values."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            return super().make_mesh(*given)


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """Join a process group of `world` ranks that transfers nothing, and make tensors without data."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with FakeTensorMode(), without_values():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_values() -> Iterator[None]:
    """Leave out the checks that read values."""
    with (
        mock.patch.object(context, "_check_ids"),
        mock.patch.object(context, "_check_positions"),
        mock.patch.object(cache.Cache, "last_position", return_value=None),
    ):
        yield


def peak_of_step(case: Case, with_loss: bool, is_fake: bool) -> dict[str, float]:
    """Return the bytes alive at the peak of the second step, by kind. Without the loss, hidden states are summed."""
    from torch.distributed._tools.mem_tracker import MemTracker

    machine = Machine(device="cpu", parallel="fsdp", precision="bfloat16", **case.machine)
    model = DecoderLM(case.config).train() if is_fake else build(case.config, device="cpu").train()  # type: ignore[arg-type]
    group = Tracked(machine)
    recompute_blocks(model, machine.recompute)
    loss = group.wrap(model, summed_loss if with_loss else summed_states)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(case.batch, case.length, dtype=torch.long)
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for number in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                total, _ = loss(model, Batch(ids, ids), Loss(), True)
            total.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                tracker.reset_mod_stats()
            del total
    found = tracker.get_tracker_snapshot("peak")
    kinds = next(iter(found.values()))
    return {str(getattr(kind, "value", kind)): float(size) for kind, size in kinds.items()}


def summed_states(model: Any, batch: Batch, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `summed_loss` does, with the sum of the hidden states in place of head and loss."""
    hidden = model.encode(batch.inputs, positions=batch.positions).float().square().sum()
    return hidden, hidden


def measure(case: Case, is_fake: bool) -> dict[str, dict[str, float]]:
    """Return the peaks of a step with and without the loss."""
    out = {}
    for name, with_loss in (("whole", True), ("without loss", False)):
        with fake_ranks(case.ranks) if is_fake else nullcontext():
            out[name] = peak_of_step(case, with_loss, is_fake)
    return out


def show(case: Case, kind: str, found: dict[str, dict[str, float]]) -> None:
    parts = ", ".join(f"{name} {size / GIB:.3f}" for name, size in sorted(found["whole"].items()) if size)
    layout = " ".join(f"{name}={value}" for name, value in case.machine.items()) or "shard"
    without, plan = found["without loss"]["Total"], case.planned()
    compared = "" if plan is None else f", planned {plan / GIB:.3f} ({plan / without - 1:+.1%})"
    print(
        f"{case.name:<6}{kind:<5} {case.ranks:>4} ranks  {layout:<28} {case.batch} x {case.length:<7} "
        f"peak {found['whole']['Total'] / GIB:8.3f} GiB, without loss {without / GIB:8.3f}{compared}  ({parts})",
        flush=True,
    )


def rank(number: int) -> None:
    """Measure a small case on real ranks; rank 0 prints a line."""
    import torch.distributed as dist

    from glassformer.training.distributed.group import leave

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = measure(cases()["small"][number], is_fake=False)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    leave(0)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", nargs="*", choices=cases(), default=list(cases()), help="Default: all cases.")
    options.add_argument("--gloo", action="store_true", help="Also measure the small case on four real ranks.")
    options.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank is not None:
        return rank(given.rank)
    for name in given.cases:
        for number, case in enumerate(cases()[name]):
            show(case, "fake", measure(case, is_fake=True))
            if given.gloo and name == "small":
                module = "glassformer.bench.developer.ranks_memory"
                launcher = (*TORCHRUN, str(case.ranks))
                show(case, "gloo", in_process(module, "--rank", str(number), launcher=launcher)[0])


if __name__ == "__main__":
    main()
