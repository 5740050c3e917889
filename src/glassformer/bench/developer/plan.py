"""Compare the predictions of `glass size plan` with measured steps of two ranks on this machine.

    python -m glassformer.bench.developer.plan [--cases 384x6 768x4] [--rounds 5]

Two ranks of torchrun run with one thread each. In every round, the throughputs measured in that round predict the
steps of the same round. What is predicted is never used to measure a throughput:

    products          each rank trains alone, both at the same time
    link, gather, …   messages of the model's own sizes are summed, gathered, scattered, and copied in memory
    gaps (sharded)    ranks train sharded, but their collectives transfer nothing (`Silent`). The time beyond a process
                      alone, the copies of `plan` and the latency of messages is torch's Python between the layers, and
                      waiting for the other rank in each layer
    gaps (tensor)     each rank trains alone, but before and after attention and feed-forward it waits for the other
                      (`Paced`), as often as ranks that divide blocks do. The time beyond a process alone and the
                      latency of messages is waiting for the slower rank, which is not always the same one

Predicted are steps of data-parallel and of fully sharded ranks, and of ranks that divide blocks (tensor) or sequences
(context): `train_step`, as in `glass train`, on random tokens. Context has the gaps of sharded ranks, because its
weights are sharded. Rounds in which other programs used more than `FOREIGN` of the two cores are counted and left out.

For one GPU: `glassformer.bench.gpu.plan_gpu`.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glassformer.bench.commands import parser, random_batch, seconds_of
from glassformer.bench.developer import in_ranks
from glassformer.config import ModelConfig, presets
from glassformer.sizing.devices import Device
from glassformer.sizing.parameters import count, parameters
from glassformer.sizing.plan import BUCKET, STEP, copies, plan, work
from glassformer.sizing.strategy import parse_strategy

RANKS = 2
WAYS = {"ddp": "data", "fsdp": "sharded", "tensor": "tensor 2", "context": "context 2"}
CONTEXT, VOCAB = 256, 1024
FOREIGN = 0.05
STEPS, MESSAGES = 3, 5
"""Steps and messages timed in a round, of each kind; the round reports their median."""
Seconds = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A model and its sequences per rank."""

    width: int
    layers: int
    each: int

    @property
    def config(self) -> ModelConfig:
        sizes: dict[str, Any] = {"n_heads": self.width // 64, "d_ff": 4 * self.width, "max_len": CONTEXT}
        return presets.gpt2(vocab_size=VOCAB, d_model=self.width, n_layers=self.layers, dropout=0.0, **sizes)

    @property
    def layer(self) -> int:
        """Elements of the message that carries a block's weights."""
        shapes = parameters(self.config).items()
        return sum(math.prod(shape) for name, shape in shapes if ".blocks.0." in name) // RANKS * RANKS

    @property
    def bucket(self) -> int:
        """Elements of the message that sums gradients."""
        return min(BUCKET // 4, count(self.config))


CASES = {"384x6": Case(384, 6, 4), "384x6-short": Case(384, 6, 1), "768x4": Case(768, 4, 2)}
"""Messages of 7 and 28 MB, whose share of a step is small and large."""


def devices_of(case: Case, seconds: Seconds) -> dict[str, Device]:
    """Return, for each way to train, the device that explains the measurements of a round."""
    layer, latency, ring = 4 * case.layer, seconds["latency"], (RANKS - 1) / RANKS
    memory = 2 * layer / seconds["copy"]
    whole, held = work(case.config, CONTEXT), count(case.config)
    moved = STEP * held + case.each * whole.moved
    rate = case.each * (whole.matmuls + whole.attention) / (seconds["alone"] - moved / memory)
    device = Device(
        name="this machine", matmuls=rate, attention=rate, memory=memory, capacity=1e12, peak=rate, gaps=0.0,
        link=2 * ring * 4 * case.bucket / (seconds["reduce"] - 2 * latency),
        gather=ring * layer / (seconds["gather"] - latency), scatter=ring * layer / (seconds["scatter"] - latency),
        network=1.0, per_machine=RANKS, latency=latency, overlap=0.0, source="bench/developer/plan.py",
    )  # fmt: skip
    # Two gathers and a scatter of 4 bytes, as planned, and what `Silent` copies. The optimizer updates only a shard.
    copied = copies(3 * 4 * held, RANKS, device) + 2 * 3 * 4 * held / RANKS / memory
    spared = STEP * held * ring / memory
    begun = 3 * (case.layers + 1) * latency
    gaps = max(0.0, seconds["silent"] - seconds["alone"] - copied - begun + spared)
    # the exchanges of a step before and after two modules of each layer, forward and backward
    waits = max(0.0, seconds["paced"] - seconds["alone"] - 8 * case.layers * latency)
    sharded = replace(device, gaps=gaps)
    return {"ddp": device, "fsdp": sharded, "tensor": replace(device, gaps=waits), "context": sharded}


class Silent:
    """A collective that transfers nothing: ranks synchronise, and each fills the other's part with its own shard."""

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Any:
        import torch

        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, **_: Any) -> None:
        import torch
        import torch.distributed as dist

        dist.all_gather_single(torch.ones(RANKS), torch.ones(1), group=group)
        if len(output_tensor) > len(input_tensor):  # a gather: its own shard is in place already
            output_tensor.view(RANKS, -1)[1 - group.rank()].copy_(input_tensor)
        else:
            output_tensor.copy_(input_tensor.view(RANKS, -1)[group.rank()])


def paced(model: Any) -> None:
    """Let ranks that train alone wait for each other before and after each attention and feed-forward module."""
    import torch
    import torch.distributed as dist

    def wait() -> None:
        dist.all_gather_single(torch.ones(RANKS), torch.ones(1))

    class Paced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            wait()
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            wait()
            return gradient

    for block in model.decoder.blocks:
        for module in (block.attention, block.feedforward):
            module.register_forward_pre_hook(lambda _, given: (Paced.apply(given[0]), *given[1:]))
            module.register_forward_hook(lambda _, __, out: Paced.apply(out))


def rank(case: Case, rounds: int) -> None:
    """Run the measurements of one rank; rank 0 prints a line for every round."""
    import torch
    import torch.distributed as dist

    from glassformer.training.distributed.group import leave

    torch.set_num_threads(1)
    states, messages = training(case), messages_of(case)  # the first run of ranks connects them
    for number in range(rounds + 1):  # the first is a warm-up
        began, used, held = time.perf_counter(), time.process_time(), busy()
        found = {}
        for name, step in states.items():
            dist.barrier()
            found[name] = median_seconds(step, STEPS if number else 1)
        for name, message in messages.items():
            found[name] = median_seconds(message, MESSAGES, dist.barrier) / case.layers
        found |= {"wall": time.perf_counter() - began, "cpu": time.process_time() - used, "busy": busy() - held}
        ranks: list[Any] = [None] * RANKS
        dist.all_gather_object(ranks, found)
        if number and dist.get_rank() == 0:
            print(json.dumps(ranks), flush=True)
    dist.barrier()
    leave(0)


def training(case: Case) -> dict[str, Callable[[], Any]]:
    """Return a training step for each way to train, for this rank."""
    from torch.distributed.fsdp import FSDPModule

    from glassformer.training.distributed.group import ALONE
    from glassformer.training.loop import prepare_state, train_step
    from glassformer.training.run import Loop, Machine, Run

    def run(batch: int, **shared: Any) -> Run:
        # the plain model everywhere, because sharded ranks cannot use the compiled kernels
        machine = Machine(device="cpu", precision="float32", compile="no", **shared)
        return Run(model=case.config, loop=Loop(steps=10_000, batch=batch), machine=machine)

    ranked = {"silent": "sharded", **WAYS}
    shared = {name: parse_strategy(text) for name, text in ranked.items()}
    sequences = {name: case.each * RANKS // how.context for name, how in shared.items()}
    states = {name: prepare_state(run(case.each), ALONE) for name in ("alone", "paced")}
    paced(states["paced"].model)
    states |= {name: prepare_state(run(sequences[name], **how.settings)) for name, how in shared.items()}
    for module in states["silent"].group.root.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(Silent())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(Silent())  # type: ignore[arg-type]
    steps: dict[str, Callable[[], Any]] = {}
    for name, state in states.items():
        each = sequences.get(name, case.each) // state.group.data_world
        batch = random_batch(each, CONTEXT, VOCAB)
        steps[name] = lambda state=state, batch=batch: train_step(state, batch)  # type: ignore[misc]
    return steps


def messages_of(case: Case) -> dict[str, Callable[[], Any]]:
    """Return functions that send messages of the sizes of training, the smallest message, and a copy.

    Each sends as many as there are layers. Each message is a tensor that was not used since the last time, as in
    training, and is received into new memory, as fully_shard does.
    """
    import torch
    import torch.distributed as dist

    wholes = [torch.ones(case.layer) for _ in range(case.layers)]
    pieces = [torch.ones(case.layer // RANKS) for _ in range(case.layers)]
    buckets = [torch.ones(case.bucket) for _ in range(2)]
    one, pair = torch.ones(1), torch.ones(RANKS)
    return {
        "gather": lambda: [dist.all_gather_single(torch.empty_like(wholes[0]), piece) for piece in pieces],
        "scatter": lambda: [dist.reduce_scatter_single(torch.empty_like(pieces[0]), whole) for whole in wholes],
        "reduce": lambda: [dist.all_reduce(buckets[i % 2]) for i in range(case.layers)],
        "latency": lambda: [dist.all_gather_single(pair, one) for _ in wholes],
        "copy": lambda: [torch.empty_like(whole).copy_(whole) for whole in wholes],
    }


def median_seconds(work: Callable[[], Any], times: int, before: Callable[[], Any] = lambda: None) -> float:
    found = []
    for _ in range(times):
        before()
        found.append(seconds_of(work))
    return statistics.median(found)


def busy() -> float:
    """Return the CPU seconds that all programs of this machine used, stolen time included; 0 where it is unknown."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, hard, soft, stolen = (int(word) for word in words[:8])
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")


def foreign(ranks: list[Seconds]) -> float:
    """Return the share of the cores that other programs used in a round."""
    first = ranks[0]
    return max(0.0, first["busy"] - sum(r["cpu"] for r in ranks)) / first["wall"] / RANKS


def measure(case: Case, name: str, rounds: int) -> list[dict[str, Any]]:
    """Return what was measured and predicted in every round. The slower rank counts: the other waits for it."""
    module, options = "glassformer.bench.developer.plan", ("--rank", name, "--rounds", str(rounds))
    found = []
    for ranks in in_ranks(module, RANKS, *options):
        seconds = {key: max(r[key] for r in ranks) for key in ranks[0]}
        devices = devices_of(case, seconds)
        common = {"batch": case.each, "context": CONTEXT, "weight_bytes": 4, "width": 4}
        plans = {kind: plan(case.config, RANKS, devices[kind], how, **common) for kind, how in WAYS.items()}
        found.append({
            "foreign": foreign(ranks), "measured": seconds, "predicted": {kind: p.step for kind, p in plans.items()},
            "communication": {kind: p.communication for kind, p in plans.items()},
            "gaps": devices["fsdp"].gaps, "waits": devices["tensor"].gaps,
        })  # fmt: skip
    return found


def show(name: str, found: list[dict[str, Any]]) -> None:
    case, quiet = CASES[name], [r for r in found if r["foreign"] <= FOREIGN]
    others = ", ".join(f"{r['foreign']:.0%}" for r in found)
    print(f"{name}: {count(case.config):,} parameters, {case.each} x {CONTEXT} tokens per rank")
    print(f"  {len(quiet)} quiet rounds of {len(found)} (other programs used {others} of the cores)")
    if not quiet:
        return
    middle = {key: statistics.median(r["measured"][key] for r in quiet) for key in quiet[0]["measured"]}
    sent = ", ".join(f"{key} {1e3 * middle[key]:.2f} ms" for key in ("gather", "scatter", "reduce", "latency", "copy"))
    gaps, waits = (statistics.median(r[key] for r in quiet) for key in ("gaps", "waits"))
    print(f"  alone {middle['alone']:.3f} s, silent {middle['silent']:.3f} s (gaps {gaps:.3f}), "
          f"paced {middle['paced']:.3f} s (waits {waits:.3f}); messages: {sent}")  # fmt: skip
    for kind in WAYS:
        predicted, sending = (statistics.median(r[key][kind] for r in quiet) for key in ("predicted", "communication"))
        errors = [r["predicted"][kind] / r["measured"][kind] - 1 for r in quiet]
        print(f"  {kind:7} predicted {predicted:.3f} s ({sending:.3f} communication), measured {middle[kind]:.3f} s: "
              f"{statistics.median(errors):+.1%} (rounds {min(errors):+.1%} to {max(errors):+.1%})")  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="Default: all cases.")
    options.add_argument("--rounds", type=int, default=5, help="Rounds per case. Default: 5.")
    options.add_argument("--rank", choices=CASES, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank:
        return rank(CASES[given.rank], given.rounds)
    for name in given.cases:
        show(name, measure(CASES[name], name, given.rounds))


if __name__ == "__main__":
    main()
