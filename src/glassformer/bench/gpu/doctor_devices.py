"""Run the doctor and `compare` on a GPU: our engine and ten classes of transformers, in float32 and bfloat16.

PYTHONPATH=src python -m glassformer.bench.gpu.doctor_devices [--device cuda] [--quick] [NAME OF A MODEL ...]

For each model the table has the doctor's verdict on the CPU and on the device, the findings whose verdict differs
between the two, and how `compare` judges the same weights on both, with the rounding error of each side in units in the
last place. Exit code 1: a verdict differs, or a comparison fails.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from glassformer.bench.commands import parser
from glassformer.bench.developer import tiny_transformers
from glassformer.bench.gpu.device import require_gpu
from glassformer.config import presets
from glassformer.doctor.compare import compare
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


@dataclass(frozen=True)
class Row:
    """What one model showed."""

    name: str
    cpu: str
    device: str
    unlike: tuple[str, ...]
    """Findings whose verdict is another one on the device."""
    compared: tuple[str, ...]
    """Verdict and rounding errors, for each dtype."""
    sound: bool
    seconds: float

    def text(self) -> str:
        lines = [f"{self.name:<32} cpu: {self.cpu}; device: {self.device}; {self.seconds:.0f} s"]
        lines += [f"{'':<4}{line}" for line in (*self.unlike, *self.compared)]
        return "\n".join([*lines, *([] if self.sound else [f"{'':<4}NOT AS ON THE CPU"])])


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
    compared, same = [], True
    for dtype in ("float32", "bfloat16"):
        result = compare(model, model, dtype=dtype, names=("cpu", str(device)), devices=("cpu", str(device)))
        same = same and result.same
        rounding = "" if result.rounding is None else f"; {result.rounding.text()}"
        compared.append(f"{dtype}: {result.sentence()}{rounding}")
    verdicts = [_verdict(report) for report in reports]
    sound = same and verdicts[0] == verdicts[1]
    return Row(name, verdicts[0], verdicts[1], unlike, tuple(compared), sound, time.perf_counter() - began)


def _verdict(report: Report) -> str:
    if report.diagnoses:
        return ", ".join(d.id for d in report.diagnoses)
    return "healthy" if report.healthy else "not examined"


def read(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    found = parser(__doc__)
    found.add_argument("names", nargs="*", help="Names of models. Default: all.")
    found.add_argument("--device", default="cuda", help="Device that is compared with the CPU.")
    found.add_argument("--quick", action="store_true", help="Make a part of the probes.")
    return found.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each model as it is finished, then a summary."""
    given = read(arguments)
    if given.device == "cuda":
        require_gpu()
    try:
        device = find_device(given.device)
    except GlassformerError as error:
        print(error, file=sys.stderr)
        return 2
    known: dict[str, Any] = models()
    if missing := [name for name in given.names if name not in known]:
        print(f"no model is called {missing[0]!r}: use one of {', '.join(known)}.", file=sys.stderr)
        return 2
    print(f"device: {device_name(device)}, torch {torch.__version__}", flush=True)
    rows, failed = [], 0
    for name in given.names or known:
        try:
            rows.append(examine(name, known[name](), device, given.quick))
        except GlassformerError as error:
            failed += 1
            print(f"{name:<32} could not be examined: {error}", flush=True)
            continue
        print(rows[-1].text(), flush=True)
    sound = sum(row.sound for row in rows)
    print(f"{sound} of {len(rows) + failed} models: the same diagnoses on both, and the same logits within rounding.")
    return 0 if sound == len(rows) + failed else 1


if __name__ == "__main__":
    sys.exit(main())
