"""Run the code of several ranks on one GPU, as one rank with nccl, and measure what FSDP and recomputation cost.

    PYTHONPATH=src python -m glassformer.bench.gpu.ranks_gpu [--seconds 120] [--json FILE]

1. Every kind of parallelism that needs no second GPU trains a small model in float32 for some steps, and its losses are
   compared with those of a process without a group. Divisions among one rank are applied as if there were several:
   fully_shard wraps the model, which `glass train` leaves out where there is one shard.
2. A run that writes its checkpoints in the background is interrupted and resumed: the losses must be those of a whole
   run.
3. Recomputation, GPT-2 124M: peak memory and time of a step for no, selective and full, and for full with three times
   the batch.
4. One rank of torchrun with `machine.parallel = "fsdp"` against no group, GPT-2 124M, in turns: eager, then compiled
   while time is left. `fsdp` is what `glass train` does with one rank; `fsdp, wrapped` applies fully_shard to it, which
   shows what its hooks cost the host, and has no bound.

`--cpu` runs the same with gloo and a tiny model, which shows that the command works and measures nothing of use.
"""

import contextlib
import gc
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from glassformer.bench.commands import in_turns, parser, random_batch, spread
from glassformer.bench.gpu.device import require_gpu
from glassformer.config import presets
from glassformer.training import accelerate, loop, open_session, read_run, resume_session
from glassformer.training.distributed.group import ALONE, Group, start
from glassformer.training.distributed.start import connect
from glassformer.training.loop import TrainState, prepare_state, train_step
from glassformer.training.objective import Batch
from glassformer.training.run import Loop, Machine, Optim, Run, Schedule

STEPS = 5
AGREE = 2e-5
"""Largest difference of losses of a small model in float32: a few roundings of numbers near 6."""
AGREE_BF16 = 2e-2
"""The same with weights or updates in bfloat16."""
SLOWER, BATCHES = 1.3, 3
"""Recomputing everything may take this much longer per token, for a batch this many times as large."""
COST = 1.03
"""Time of a step with FSDP on one rank, as a multiple of one without a group."""
SHARD = ("shard",)
"""Wraps a model that has one shard."""
WRAPPED = "fsdp, wrapped"

KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ddp": ({"parallel": "ddp"}, ()),
    "fsdp": ({"parallel": "fsdp"}, SHARD),
    "fsdp, not wrapped": ({"parallel": "fsdp"}, ()),
    "hsdp 1 x 1": ({"parallel": "fsdp"}, ("replicate",)),
    "tensor 1": ({"parallel": "fsdp"}, ("tensor",)),
    "tensor 1, fsdp": ({"parallel": "fsdp"}, ("tensor", *SHARD)),
    "context 1": ({"parallel": "fsdp"}, ("context", *SHARD)),
    "hsdp, tensor, context": ({"parallel": "fsdp"}, ("replicate", "tensor", "context")),
    "the same, recomputed": ({"parallel": "fsdp", "recompute": "full"}, ("replicate", "tensor", "context")),
    "fsdp, selective": ({"parallel": "fsdp", "recompute": "selective"}, SHARD),
    "fsdp, full": ({"parallel": "fsdp", "recompute": "full"}, SHARD),
    "fsdp, bf16 gathers": ({"parallel": "fsdp", "precision": "bfloat16", "gather": "bfloat16"}, SHARD),
    "ddp, muon": ({"parallel": "ddp"}, ()),
    "fsdp, muon": ({"parallel": "fsdp"}, SHARD),
}
"""Settings of `machine`, and dimensions of the mesh that are made though they have one rank."""


class Report:
    """Prints lines as they come, and keeps what a JSON file holds."""

    def __init__(self, seconds: float):
        self.found: dict[str, Any] = {"torch": torch.__version__}
        self.failed: list[str] = []
        self.began, self.limit = time.perf_counter(), seconds

    def line(self, kind: str, name: str, passed: bool | None, text: str, **values: Any) -> None:
        """Print one measurement; `passed` is None where there is no bound."""
        verdict = {True: "ok", False: "FAILED", None: ""}[passed]
        print(f"{time.perf_counter() - self.began:6.1f} s  {kind:<10} {name:<24} {text}  {verdict}", flush=True)
        self.found.setdefault(kind, {})[name] = {**values, "passed": passed}
        if passed is False:
            self.failed.append(f"{kind} {name}")

    @contextlib.contextmanager
    def errors(self, kind: str, name: str) -> Iterator[None]:
        """Report an error as a failure, so that the rest is measured as well."""
        try:
            yield
        except Exception as error:
            self.line(kind, name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

    def left(self) -> float:
        return self.limit - (time.perf_counter() - self.began)


def join(run: Run, forced: tuple[str, ...] = ()) -> Group:
    """Return the group of one rank. `forced` are dimensions of the mesh that it gets though they have one rank."""
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=port)
    group: Any = connect(run)
    group.forced = forced
    return group


def wrapped(run: Run) -> Group:
    """Return the group of one rank that wraps its model."""
    return join(run, SHARD)


def small_run(device: str, optimizer: str = "adamw", **machine: Any) -> Run:
    """Grouped heads, rotary positions, a norm per head and an untied head."""
    model = presets.llama_tiny(n_layers=3, d_model=64, n_heads=4, n_kv_heads=2, d_ff=96, vocab_size=101, max_len=64)
    return Run(
        model=model,
        optim=Optim(kind=optimizer, lr=1e-3, clip=0.5),  # type: ignore[arg-type]
        schedule=Schedule("constant", warmup=0),
        loop=Loop(steps=100, batch=8, context=64, accumulate=2),
        machine=Machine(**{"device": device, "precision": "float32", "compile": "no", **machine}),
    )


def large_run(device: str, batch: int, tiny: bool, **machine: Any) -> Run:
    """GPT-2 124M, bf16 matmuls, without dropout."""
    small = {"n_layers": 2, "d_model": 32, "n_heads": 2, "vocab_size": 300, "max_len": 32}
    model = presets.gpt2(dropout=0.0, **(small if tiny else {"vocab_size": 50304}))
    return Run(
        model=model,
        optim=Optim(lr=6e-4),
        schedule=Schedule("constant", warmup=0),
        loop=Loop(steps=100_000, batch=batch),
        machine=Machine(**{"device": device, "precision": "bfloat16", **machine}),
    )


def draw(run: Run, number: int = 0) -> Batch:
    return random_batch(run.loop.batch, run.context, min(512, run.model.vocab_size), number, run.machine.device)


def losses(run: Run, group: Group) -> list[float]:
    """Return the losses of the first steps, and the norm of the first gradient."""
    state = prepare_state(run, group)
    events = [train_step(state, draw(run, number)) for number in range(STEPS)]
    return [*(float(event["loss"]) for event in events), float(events[0]["gradient_norm"])]


def check_kinds(report: Report, device: str) -> None:
    """Compare each kind of parallelism with a process without a group."""
    alone: dict[str, list[float]] = {}
    for name, (machine, forced) in KINDS.items():
        optimizer = "muon" if "muon" in name else "adamw"
        if optimizer not in alone:
            alone[optimizer] = losses(small_run(device, optimizer), ALONE)
        run = small_run(device, optimizer, **machine)
        bound = AGREE_BF16 if "bf16" in name or optimizer == "muon" else AGREE
        with report.errors("kinds", name):
            found = losses(run, join(run, forced))
            error = max(abs(a - b) for a, b in zip(found, alone[optimizer], strict=True))
            text = f"largest difference {error:.1e} (at most {bound:.0e})"
            report.line("kinds", name, error <= bound, text, error=error)


def check_resume(report: Report, device: str) -> None:
    """Resume a run from its middle: without ranks, and as one rank whose checkpoints are written in the background."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text("the cat sat on the mat and saw that dog.\n" * 400)
        settings = (
            *("model.n_layers=2", "model.d_model=32", "model.n_heads=2", "model.max_len=16", "loop.steps=12"),
            *("loop.batch=4", "loop.eval_every=6", "loop.checkpoint_every=6", "loop.log_every=1", "loop.keep=9"),
            *("loop.sample_every=0", "schedule.warmup=2", "machine.precision=float32", f"machine.device={device}"),
            *("machine.compile=no", f'data.corpus="{folder / "corpus.txt"}"', f'data.cache="{folder / "tokens"}"'),
        )
        curves: dict[str, dict[int, float]] = {}

        def listen(curve: dict[int, float], event: dict[str, Any]) -> None:
            if event["event"] == "step":
                curve[event["step"]] = event["loss"]

        for kind in ("alone", "ddp", "fsdp"):
            extra = () if kind == "alone" else (f"machine.parallel={kind}", "checkpoint.background=true")
            session = open_session(read_run("", (*settings, *extra, f'out="{folder / kind}"')))
            with contextlib.nullcontext() if kind == "alone" else mock.patch.object(loop, "start", wrapped):
                loop.train(session.run, session.data, partial(listen, curves.setdefault(kind, {})))
                half = folder / kind / "checkpoints" / "step-00000006"
                again = resume_session(str(half), (f'out="{folder / kind / "again"}"',))
                resumed = curves.setdefault(f"{kind} resumed", {})
                loop.train(again.run, again.data, partial(listen, resumed), resume=again.resume)
        for kind in ("ddp", "fsdp", "alone resumed", "ddp resumed", "fsdp resumed"):
            steps = range(7, 13) if "resumed" in kind else range(1, 13)
            error = max(abs(curves[kind].get(i, 1e9) - curves["alone"][i]) for i in steps)
            text = f"background checkpoints, largest difference {error:.1e} (at most {AGREE:.0e})"
            report.line("train", kind, error <= AGREE, text, error=error)


@contextlib.contextmanager
def same_implementation() -> Iterator[None]:
    """Choose the kernels that sharded parameters allow, also for a process without a group."""
    install = accelerate.install
    with mock.patch.object(accelerate, "install", lambda model, **r: install(model, **{**r, "sharded": True})):
        yield


class Timed:
    """A training step that is measured, and its peak of memory."""

    def __init__(self, run: Run, group: Group, count: int = 2):
        self.state: TrainState = prepare_state(run, group)
        self.batch, self.count = draw(run), count
        self.loss = 0.0
        self.step()  # compiles, allocates the optimizer state

    def step(self) -> None:
        self.loss = float(train_step(self.state, self.batch)["loss"])  # waits for the device

    def seconds(self) -> float:
        began = time.perf_counter()
        for _ in range(self.count):
            self.step()
        return (time.perf_counter() - began) / self.count

    def peak(self) -> float:
        """Return the peak of GPU memory of a step, in GiB; 0 on a CPU."""
        if self.state.device.type != "cuda":
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return torch.cuda.max_memory_allocated() / 2**30


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def measure_recompute(report: Report, device: str, batch: int, tiny: bool) -> None:
    """Peak memory and time per token, eager, without a group; each alone in memory."""
    found: dict[str, tuple[float, float]] = {}
    for name, kind, times in (
        ("no", "no", 1),
        ("selective", "selective", 1),
        ("full", "full", 1),
        (f"full, batch x {BATCHES}", "full", BATCHES),
    ):
        run = large_run(device, batch * times, tiny, compile="no", recompute=kind)
        with same_implementation():
            timed = Timed(run, ALONE)
        rounds = [timed.seconds() for _ in range(3)]
        seconds, peak = statistics.median(rounds) / times, timed.peak()
        found[name] = (seconds, peak)
        slower, lower = seconds / found["no"][0], peak / (found["no"][1] or 1.0)
        passed = slower <= SLOWER and lower <= 1.0 if times > 1 else None
        text = (
            f"batch {batch * times}: {1e3 * seconds:.1f} ms per {batch} sequences ({slower:.2f} x), "
            f"peak {peak:.1f} GiB ({lower:.2f} x), spread {spread(rounds):.1%}"
        )
        if times > 1:
            text += f" (at most {SLOWER:g} x the time, in no more memory)"
        values = {"batch": batch * times, "seconds": seconds, "gib": peak, "slower": slower, "memory": lower}
        report.line("recompute", name, None if tiny else passed, text, **values)
        del timed
        free()


def measure_fsdp(report: Report, device: str, batch: int, tiny: bool, compiled: bool) -> None:
    """Time a step with DDP and FSDP on one rank against the same step without a group, in turns."""
    word = "compiled" if compiled else "eager"
    run = large_run(device, batch, tiny, compile="yes" if compiled else "no")
    timed: dict[str, Timed] = {}
    with same_implementation():
        for name in ("none", "fsdp", WRAPPED) if compiled else ("none", "ddp", "fsdp", WRAPPED):
            machine = {} if name == "none" else {"parallel": name.partition(",")[0]}
            own = large_run(device, batch, tiny, compile=run.machine.compile, **machine)
            # `start` returns the group of the processes of torchrun, of which there is one here
            group = {"none": lambda run: ALONE, "ddp": join, "fsdp": start, WRAPPED: wrapped}[name](own)
            timed[name] = Timed(own, group)
    rounds = in_turns({name: one.seconds for name, one in timed.items()}, 5, warm_up=1)
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    for name, times in rounds.items():
        ratio = medians[name] / medians["none"]
        is_bound = name not in ("none", WRAPPED)
        passed = ratio <= COST if is_bound and not tiny else None
        limit = f" (at most {COST:g})" if is_bound else ""
        text = (
            f"{word}, batch {batch}: {1e3 * medians[name]:.1f} ms, {ratio:.3f} of none{limit}, "
            f"spread {spread(times):.1%}, loss {timed[name].loss:.3f}"
        )
        values = {"seconds": medians[name], "ratio": ratio, "spread": spread(times)}
        report.line("cost", f"{name}, {word}", passed, text, **values)
    del timed
    free()


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--cpu", action="store_true", help="Run with gloo and a tiny model instead.")
    options.add_argument("--batch", type=int, default=32, help="Sequences per step of GPT-2 124M. Default: 32.")
    options.add_argument("--seconds", type=float, default=120, help="Start nothing new after this time. Default: 120.")
    options.add_argument("--json", metavar="FILE", help="Also write the figures to this file.")
    given = options.parse_args(arguments)
    if not given.cpu:
        require_gpu()
    device, tiny = ("cpu", True) if given.cpu else ("cuda", False)
    batch = 2 if tiny else given.batch
    report = Report(given.seconds)
    parts: list[tuple[float, partial[None]]] = [
        (30, partial(check_kinds, report, device)),
        (20, partial(check_resume, report, device)),
        (20, partial(measure_recompute, report, device, batch, tiny)),
        (10, partial(measure_fsdp, report, device, batch, tiny, False)),
        (40, partial(measure_fsdp, report, device, batch, tiny, True)),
    ]
    for expected, part in parts[: len(parts) - tiny]:
        if report.left() < expected:
            print(f"left out, less than {expected} s are left: {part.func.__name__}", flush=True)
            report.found.setdefault("left_out", []).append(part.func.__name__)
            continue
        with report.errors("error", part.func.__name__):
            part()
        free()
    report.found["seconds"] = time.perf_counter() - report.began
    if given.json:
        Path(given.json).write_text(json.dumps(report.found, indent=1))
    print(json.dumps(report.found))
    print("all bounds hold" if not report.failed else f"FAILED: {', '.join(report.failed)}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
