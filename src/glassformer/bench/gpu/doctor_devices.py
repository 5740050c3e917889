"""Run the doctor and `compare` on a GPU: our engine and ten classes of transformers, in float32 and bfloat16.

PYTHONPATH=src python -m glassformer.bench.gpu.doctor_devices [--device cuda] [--quick] [--workers N] [NAME ...]

For each model the table has the doctor's verdict on the CPU and on the device, how many findings have another verdict
on the device, and for each dtype how `compare` judges the same weights on both: the verdict, and the rounding error of
the CPU and of the device in units in the last place. What differs is written out below the table. Models are examined
in several processes, because a tiny model keeps neither the GPU nor more than one core busy. Exit code 1: a verdict
differs, or a comparison fails.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from torch import nn

from glassformer.bench.commands import parser
from glassformer.bench.developer import tiny_transformers
from glassformer.bench.gpu.device import require_gpu
from glassformer.config import presets
from glassformer.doctor.compare import compare
from glassformer.doctor.compare.result import Comparison
from glassformer.doctor.diagnose import diagnose
from glassformer.doctor.report import Report
from glassformer.doctor.subject.device import device_name, find_device
from glassformer.errors import GlassformerError
from glassformer.model import build

CLASSES = (
    "GPT2LMHeadModel", "LlamaForCausalLM", "GPTNeoXForCausalLM", "MixtralForCausalLM", "Gemma2ForCausalLM",
    "BloomForCausalLM", "MambaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration",
    "BartForConditionalGeneration",
)  # fmt: skip
"""All three kinds, every position scheme, experts, windows and soft caps, and a recurrence."""


DTYPES = ("float32", "bfloat16")
MOST_WORKERS = 8
"""Each holds a CUDA context and its own copy of transformers."""


@dataclass(frozen=True)
class Row:
    """What one model showed."""

    name: str
    cpu: str
    device: str
    unlike: tuple[str, ...]
    """Findings whose verdict is another one on the device."""
    compared: tuple[str, ...]
    """Verdict and rounding errors, for each dtype, in a few words."""
    apart: tuple[str, ...]
    """The sentence about each dtype in which they differ."""
    sound: bool
    seconds: float

    def cells(self) -> list[str]:
        unlike = str(len(self.unlike)) if self.unlike else "-"
        verdict = "same" if self.sound else "DIFFERS"
        return [self.name, self.cpu, self.device, unlike, *self.compared, f"{self.seconds:.0f}", verdict]

    def details(self) -> list[str]:
        return [f"{self.name}: {line}" for line in (*self.unlike, *self.apart)]


HEADER = ["model", "doctor, cpu", "doctor, device", "other findings", *DTYPES, "s", ""]


def table(rows: list[Row]) -> str:
    """Return a Markdown table, and below it what differs."""
    cells = [HEADER, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = ["| " + " | ".join(cell.ljust(n) for cell, n in zip(line, widths, strict=True)) + " |" for line in cells]
    lines.insert(1, "|" + "|".join("-" * (n + 2) for n in widths) + "|")
    return "\n".join([*lines, *(line for row in rows for line in row.details())])


def models() -> dict[str, Callable[[], nn.Module]]:
    """Return what builds each model."""
    ours: dict[str, Callable[[], nn.Module]] = {
        "glassformer nano": lambda: build(presets.nano(n_layers=2), seed=0),
        "glassformer llama_tiny": lambda: build(presets.llama_tiny(n_layers=2), seed=0),
        "glassformer moe_tiny": lambda: build(presets.moe_tiny(n_layers=2), seed=0),
    }
    return ours | {name: lambda name=name: tiny_transformers.build(name) for name in CLASSES}


def examine(name: str, model: nn.Module, device: torch.device, quick: bool) -> Row:
    """Examine one model on the CPU and on a device, and compare the two."""
    began = time.perf_counter()
    reports = [diagnose(model, quick=quick, device=where, name=name) for where in (torch.device("cpu"), device)]
    here, there = ({f.id: str(f.verdict) for f in report.findings} for report in reports)
    ids = [id for id in {**here, **there} if here.get(id) != there.get(id)]
    why = {f.id: f.why for f in reports[1].findings}
    unlike = tuple(f"{id}: {here.get(id)} on the CPU, {there.get(id)}: {why.get(id, '')}" for id in ids)
    results = {
        dtype: compare(model, model, dtype=dtype, names=("cpu", str(device)), devices=("cpu", str(device)))
        for dtype in DTYPES
    }
    apart = tuple(f"{dtype}: {result.sentence()}" for dtype, result in results.items() if not result.same)
    verdicts = [_verdict(report) for report in reports]
    sound = not apart and verdicts[0] == verdicts[1]
    compared = tuple(_compared(result) for result in results.values())
    return Row(name, verdicts[0], verdicts[1], unlike, compared, apart, sound, time.perf_counter() - began)


def _compared(result: Comparison) -> str:
    """Return the verdict, and the rounding errors of the CPU and of the device in units in the last place."""
    sides = None if result.rounding is None else result.rounding.sides
    if sides is None:
        return f"{result.verdict}, rounding not measured"
    return f"{result.verdict}, {sides[0].units:.1f} and {sides[1].units:.1f} ulp"


def _verdict(report: Report) -> str:
    if report.diagnoses:
        return ", ".join(d.id for d in report.diagnoses)
    return "healthy" if report.healthy else "not examined"


def examine_named(name: str, device: str, quick: bool) -> Row | str:
    """Build and examine one model; the reason if that is not possible."""
    torch.set_num_threads(1)
    try:
        return examine(name, models()[name](), find_device(device), quick)
    except GlassformerError as error:
        return f"{name}: could not be examined: {error}"


def examined(names: list[str], device: str, quick: bool, workers: int) -> Iterator[Row | str]:
    """Examine models, in several processes if there are several workers, and yield each result when it is there."""
    if workers == 1:
        yield from (examine_named(name, device, quick) for name in names)
        return
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in as_completed([pool.submit(examine_named, name, device, quick) for name in names]):
            yield done.result()


def read(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    found = parser(__doc__)
    found.add_argument("names", nargs="*", help="Names of models. Default: all.")
    found.add_argument("--device", default="cuda", help="Device that is compared with the CPU.")
    found.add_argument("--quick", action="store_true", help="Make a part of the probes.")
    most = min(MOST_WORKERS, os.cpu_count() or 1)
    found.add_argument("--workers", type=int, default=most, help="Number of processes. Default: one per core, up to 8.")
    return found.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each model as it is finished, then the table and a summary."""
    given = read(arguments)
    if given.device == "cuda":
        require_gpu()
    try:
        device = find_device(given.device)
    except GlassformerError as error:
        print(error, file=sys.stderr)
        return 2
    known = list(models())
    if missing := [name for name in given.names if name not in known]:
        print(f"no model is called {missing[0]!r}: use one of {', '.join(known)}.", file=sys.stderr)
        return 2
    began, names = time.perf_counter(), list(given.names or known)
    rows, failed = [], []
    for found in examined(names, given.device, given.quick, max(1, min(given.workers, len(names)))):
        if isinstance(found, str):
            failed.append(found)
        else:
            rows.append(found)
            print(f"{found.name}: {found.seconds:.0f} s", file=sys.stderr, flush=True)
    print(f"device: {device_name(device)}, torch {torch.__version__}")
    print("\n".join([table(sorted(rows, key=lambda row: names.index(row.name))), *failed]))
    sound = sum(row.sound for row in rows)
    print(
        f"{sound} of {len(names)} models: the same diagnoses on both, and the same logits within rounding; "
        f"{time.perf_counter() - began:.0f} s in all."
    )
    return 0 if sound == len(names) else 1


if __name__ == "__main__":
    sys.exit(main())
