"""What to measure, validated before anything is loaded."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from glassformer.errors import GlassformerError, nearest

Task = Literal["decode", "prefill", "encode", "train", "startup"]
TASKS: tuple[str, ...] = get_args(Task)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one weight, without quantisation scales."""
PRECISIONS = tuple(BYTES)
ALL = "all"

# Defaults of each task, as in docs/benchmarks.md. In training, `new` is the number of steps per turn.
_PROMPT = {"decode": 32, "prefill": 512, "encode": 128, "startup": 32, "train": 0}
_NEW = {"decode": 128, "prefill": 1, "encode": 1, "startup": 1, "train": 10}
_BATCH = {"encode": 32}


class BenchError(GlassformerError):
    """A benchmark that cannot be run. One sentence."""


def unknown(name: str, known: Iterable[str], what: str) -> str:
    """Return the error message for an unknown name."""
    return f"{name!r} is not a {what}.{nearest(name.lower(), known, 'Use one of')}"


@dataclass(frozen=True)
class Plan:
    """One measurement. 0 for `batch`, `prompt`, `new` and `threads` means the default of the task or the machine."""

    task: str
    against: tuple[str, ...] = (ALL,)
    precisions: tuple[str, ...] = ()
    batch: int = 0
    prompt: int = 0
    new: int = 0
    rounds: int = 5
    threads: int = 0
    model: str = "gpt2"
    layers: int = 0
    """Number of layers in place of the preset's; 0: as the preset."""
    cpu_time: bool = False
    """Measure processor seconds of one thread, not seconds: for a machine on which other programs run."""
    checkouts: dict[str, Path] = field(default_factory=dict)
    """Folders of peers that are not packages, by contender."""
    keep: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise BenchError(unknown(self.task, TASKS, "benchmark"))
        for precision in self.precisions:
            if precision not in PRECISIONS:
                raise BenchError(unknown(precision, PRECISIONS, "precision"))
        for name, least in (("batch", 0), ("rounds", 1), ("prompt", 0), ("new", 0), ("threads", 0), ("layers", 0)):
            if getattr(self, name) < least:
                raise BenchError(f"--{name} {getattr(self, name)} must be a whole number of at least {max(least, 1)}.")
        if self.task == "decode" and self.length_new < 3:
            raise BenchError(f"--new {self.new} is too few: throughput counts from the second token on: give 3.")
        if self.task in ("prefill", "startup") and self.length_new != 1:
            raise BenchError(f"{self.task} ends with the first token: leave --new out.")
        if self.cpu_time and (self.threads > 1 or self.task in ("train", "startup")):
            raise BenchError("--cpu-time measures decode, prefill and encode in one thread: leave --threads out.")
        if self.task == "encode" and self.new:
            raise BenchError("an encoder makes no new tokens: leave --new out.")
        if self.task == "startup" and self.sequences != 1:
            raise BenchError("startup measures the time to one token of one prompt: leave --batch out.")
        if self.task == "train" and (self.model != "gpt2" or self.sequences != 1 or self.prompt or self.layers):
            raise BenchError(
                "train measures nanoGPT's two CPU settings: leave --model, --layers, --batch and --prompt out."
            )

    @property
    def sequences(self) -> int:
        """Number of sequences that are computed together."""
        return self.batch or _BATCH.get(self.task, 1)

    @property
    def length_prompt(self) -> int:
        return self.prompt or _PROMPT[self.task]

    @property
    def length_new(self) -> int:
        return self.new or _NEW[self.task]

    @property
    def n_threads(self) -> int:
        return 1 if self.cpu_time else self.threads or available_cores()

    def checkout(self, contender: str) -> str:
        """Return the folder given for a contender, or an empty string."""
        return str(self.checkouts[contender].resolve()) if contender in self.checkouts else ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task, "against": list(self.against), "precisions": list(self.precisions),
            "batch": self.sequences, "prompt": self.length_prompt, "new": self.length_new, "rounds": self.rounds,
            "threads": self.n_threads, "model": self.model, "layers": self.layers, "seed": self.seed,
            "cpu_time": self.cpu_time,
        }  # fmt: skip


def available_cores() -> int:
    """Return the number of cores this process may use; in a container it can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
