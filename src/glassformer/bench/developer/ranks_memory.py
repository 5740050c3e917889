"""Peak memory of one rank in a training step, of models that fit on no machine at hand, by torch's fake process group.

    python -m glassformer.bench.developer.ranks_memory [--cases small 302M 8B 70B] [--gloo]

The step of rank 0 runs with tensors that have shapes and no data (FakeTensorMode), and with collectives that transfer
nothing. What is alive at its peak is counted by kind (torch's MemTracker): parameters, gradients, optimizer state,
activations, temporary tensors. It is compared with what `glass size plan` predicts.

`--gloo` measures the small model and that of 302M parameters with real ranks of torchrun as well, in the same way.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from glassformer.bench.commands import parser
from glassformer.bench.developer import in_ranks
from glassformer.config import ModelConfig, presets
from glassformer.model import DecoderLM, build, cache, context
from glassformer.sizing.rank_memory import rank_bytes
from glassformer.sizing.strategy import Strategy
from glassformer.training.blocks import recompute_blocks
from glassformer.training.distributed import context as sequences
from glassformer.training.distributed.sharding import Sharded
from glassformer.training.objective import Batch, summed_loss
from glassformer.training.run import Loss, Machine

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

    def planned(self) -> float:
        """Return the peak of bytes that `glass size plan` predicts for this, with the loss of plain torch."""
        degrees = {name: self.machine.get(name, 1) for name in ("replicate", "tensor", "context")}
        width = 2 if "gather" in self.machine else 4
        how, recompute = Strategy(**degrees), "recompute" in self.machine
        return rank_bytes(self.config, self.ranks, how, self.batch, self.length, recompute, width, plain_loss=True)


def cases() -> dict[str, list[Case]]:
    """Return the cases by name of the model."""
    small = presets.llama_tiny(n_layers=4, d_model=256, n_heads=8, n_kv_heads=4, d_ff=768, vocab_size=1000, max_len=256)
    of_302m = presets.gpt2_medium(vocab_size=1024, max_len=256, dropout=0.0)
    of_8b, of_70b = presets.llama3_8b(), presets.llama2_70b()
    full, narrow = {"recompute": "full"}, {"gather": "bfloat16"}
    ways: list[dict[str, Any]] = [{"replicate": 2}, {"tensor": 2}, {"context": 2}, {"tensor": 2, "context": 2}]
    of_small = [{}, narrow, full, *({**way, **narrow} for way in ways)]
    of_medium = [narrow, {**full, **narrow}, *({**way, **narrow} for way in ways)]
    return {
        "small": [Case("small", small, 4, 4, 256, machine) for machine in of_small],
        "302M": [
            Case("302M", of_302m, 2, 1, 256, narrow),
            *(Case("302M", of_302m, 4, 1, 256, machine) for machine in of_medium),
        ],
        "8B": [
            Case("8B", of_8b, 8, 1, 8192, {**full, **narrow}),
            Case("8B", of_8b, 8, 8, 8192, {"tensor": 8, **full, **narrow}),
            Case("8B", of_8b, 64, 1, 131072, {"context": 8, **full, **narrow}),
        ],
        "70B": [
            Case("70B", of_70b, 64, 1, 4096, {**full, **narrow}),
            Case("70B", of_70b, 64, 8, 4096, {"tensor": 8, **full, **narrow}),
            Case("70B", of_70b, 64, 4, 4096, {"tensor": 4, "context": 4, **full, **narrow}),
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
    """Leave out the checks that read values, and the masks of divided sequences, which a GPU never writes out."""
    with (
        mock.patch.object(sequences, "last_causal", return_value=None),
        mock.patch.object(context, "_check_ids"),
        mock.patch.object(context, "_check_positions"),
        mock.patch.object(cache.Cache, "last_position", return_value=None),
    ):
        yield


def make_tracker() -> Any:
    """Return torch's MemTracker without the peaks of modules, for which it goes through all modules in each operation.

    That takes most of the time of a model of 80 layers.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    class Tracker(MemTracker):
        def _update_peak_stats(self, peak_state: Any) -> None:
            for device, alive in self._curr_mem_snap.items():
                if self._peak_mem.get(device, 0) < alive["Total"]:
                    self._peak_mem[device] = alive["Total"]
                    self._peak_mem_snap[device] = dict(alive)

    return Tracker()


def peak_of_step(case: Case, is_fake: bool) -> dict[str, float]:
    """Return the bytes alive at the peak of the second step, by kind."""
    machine = Machine(device="cpu", parallel="fsdp", precision="bfloat16", **case.machine)
    model = DecoderLM(case.config).train() if is_fake else build(case.config, device="cpu").train()  # type: ignore[arg-type]
    group = Tracked(machine)
    recompute_blocks(model, machine.recompute)
    loss = group.wrap(model, summed_loss)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.zeros(case.batch, case.length, dtype=torch.long)
    tracker = make_tracker()
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


def measure(case: Case, is_fake: bool) -> dict[str, float]:
    """Return the bytes alive at the peak of a step, by kind."""
    with fake_ranks(case.ranks) if is_fake else nullcontext():
        return peak_of_step(case, is_fake)


def show(case: Case, kind: str, found: dict[str, float]) -> None:
    parts = ", ".join(f"{name} {size / GIB:.3f}" for name, size in sorted(found.items()) if size and name != "Total")
    layout = " ".join(f"{name}={value}" for name, value in case.machine.items()) or "shard"
    peak, planned = found["Total"], case.planned()
    print(
        f"{case.name:<6}{kind:<5} {case.ranks:>4} ranks  {layout:<44} {case.batch} x {case.length:<7} "
        f"peak {peak / GIB:8.3f} GiB, planned {planned / GIB:8.3f} ({planned / peak - 1:+.1%})  ({parts})",
        flush=True,
    )


def rank(name: str) -> None:
    """Measure a case on real ranks; rank 0 prints a line. `name` is that of the model and the number of the case."""
    import torch.distributed as dist

    from glassformer.training.distributed.group import leave

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model, _, number = name.partition(" ")
    found = measure(cases()[model][int(number)], is_fake=False)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    leave(0)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", nargs="*", choices=cases(), default=list(cases()), help="Default: all cases.")
    options.add_argument("--gloo", action="store_true", help="Also measure small and 302M on real ranks.")
    options.add_argument("--rank", metavar="CASE", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank is not None:
        return rank(given.rank)
    for name in given.cases:
        for number, case in enumerate(cases()[name]):
            show(case, "fake", measure(case, is_fake=True))
            if given.gloo and name in ("small", "302M"):
                module = "glassformer.bench.developer.ranks_memory"
                show(case, "gloo", in_ranks(module, case.ranks, "--rank", f"{name} {number}")[0])


if __name__ == "__main__":
    main()
