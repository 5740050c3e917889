"""What to measure, validated before anything is loaded."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from glassformer.errors import GlassformerError, nearest

Task = Literal["decode", "prefill", "encode", "train", "startup"]
TASKS: tuple[str, ...] = get_args(Task)
DEVICES: tuple[str, ...] = ("cpu", "cuda")
BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5, "float8": 1.0}
"""Bytes of one weight, without quantisation scales."""
PRECISIONS = tuple(BYTES)
ALL = "all"

# Defaults of each task, as in docs/benchmarks.md. In training, `new` is the number of steps per turn.
_PROMPT = {"decode": 32, "prefill": 512, "encode": 128, "startup": 32, "train": 512}
_NEW = {"decode": 128, "prefill": 1, "encode": 1, "startup": 1, "train": 10}
_BATCH = {"encode": 32}
_TRAINED_BATCH = 4
_PRECISIONS = {"cpu": ("float32", "bfloat16", "int8", "int4"), "cuda": ("bfloat16",)}
FIRST_STEPS = 10
"""Training steps from whose end start-up is measured."""


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
    model: str = ""
    """A preset or a model folder. Default: gpt2, or for train nanoGPT's two CPU settings."""
    layers: int = 0
    """Number of layers in place of the preset's; 0: as the preset."""
    cpu_time: bool = False
    """Measure processor seconds of one thread, not seconds: for a machine on which other programs run."""
    checkouts: dict[str, Path] = field(default_factory=dict)
    """Folders of peers that are not packages, by contender."""
    keep: Path | None = None
    seed: int = 0
    device: str = "cpu"
    training: bool = False
    """Start-up only: measure the time to the tenth training step, not to the first token."""
    sampled: bool = False
    """Decoding only: draw each token with the defaults of `glass sample`. The greedy tokens are compared before."""

    beams: int = 1
    """Decoding only: 1 is greedy; more search, and whole calls are measured, from the prompt on."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise BenchError(unknown(self.task, TASKS, "benchmark"))
        if self.device not in DEVICES:
            raise BenchError(f"--device {self.device} is not known: use {' or '.join(DEVICES)}.")
        for precision in self.precisions:
            self._check_precision(precision)
        for name, least in (("batch", 0), ("rounds", 1), ("prompt", 0), ("new", 0), ("threads", 0), ("layers", 0)):
            if getattr(self, name) < least:
                raise BenchError(f"--{name} {getattr(self, name)} must be a whole number of at least {max(least, 1)}.")
        if self.task == "decode" and self.length_new < 3:
            raise BenchError(f"--new {self.new} is too few: throughput counts from the second token on: give 3.")
        if self.task in ("prefill", "startup") and self.length_new != 1:
            raise BenchError(f"{self.task} has no number of new tokens: leave --new out.")
        if self.cpu_time and (self.threads > 1 or self.task in ("train", "startup")):
            raise BenchError("--cpu-time measures decode, prefill and encode in one thread: leave --threads out.")
        if self.task == "encode" and self.new:
            raise BenchError("an encoder makes no new tokens: leave --new out.")
        if self.task == "startup" and self.batch > 1 and not self.training:
            raise BenchError("startup measures the time to one token of one prompt: leave --batch out.")
        if self.task == "train" and not self.model:
            self._check_fixed_settings()
        if self.sampled and self.task != "decode":
            raise BenchError(f"--sampled belongs to decode, not to {self.task}: leave it out.")
        if self.beams < 1 or (self.beams > 1 and (self.task != "decode" or self.sampled)):
            raise BenchError(f"--beams {self.beams} must be 1, or more with decode and without --sampled.")
        if self.training and self.task != "startup":
            raise BenchError(f"--training belongs to startup, not to {self.task}: leave it out.")
        if self.cpu_time and self.device != "cpu":
            raise BenchError(f"--cpu-time measures a CPU: leave it out, or --device {self.device}.")

    def _check_precision(self, precision: str) -> None:
        if precision not in PRECISIONS:
            raise BenchError(unknown(precision, PRECISIONS, "precision"))
        if precision == "float8" and self.device == "cpu":
            raise BenchError("--precision float8 is for GPUs: give --device cuda, or another precision.")
        if precision == "int4" and self.device == "cuda":
            raise BenchError("--precision int4 is for CPUs: a GPU has int8 and float8.")
        if self.trains and precision in ("int8", "int4"):
            supported = "float32 and bfloat16" + (", and float8 on a GPU" if self.model else "")
            raise BenchError(f"training supports {supported}, not {precision}: give one of them as --precision.")

    def _check_fixed_settings(self) -> None:
        if self.device != "cpu":
            raise BenchError(f"train on --device {self.device} needs a model: give --model, such as --model gpt2.")
        if self.batch or self.prompt or self.layers:
            raise BenchError(
                "train without --model measures nanoGPT's two CPU settings: leave --layers, --batch and --prompt out, "
                "or give --model."
            )

    @property
    def trains(self) -> bool:
        """True if training steps are measured."""
        return self.task == "train" or self.training

    @property
    def chosen_precisions(self) -> tuple[str, ...]:
        """The precisions that were given, or those of the device."""
        if self.precisions:
            return tuple(dict.fromkeys(self.precisions))
        return tuple(p for p in _PRECISIONS[self.device] if not (self.trains and p.startswith("int")))

    @property
    def model_name(self) -> str:
        return self.model or "gpt2"

    @property
    def sequences(self) -> int:
        """Number of sequences that are computed together."""
        if self.trains and (self.model or self.training):
            return self.batch or _TRAINED_BATCH
        return self.batch or _BATCH.get(self.task, 1)

    @property
    def length_prompt(self) -> int:
        """Tokens of a prompt; in training, of a sequence."""
        if self.task == "train" and not self.model:
            return 0
        return self.prompt or _PROMPT["train" if self.training else self.task]

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
            "threads": self.n_threads, "model": self.model_name, "layers": self.layers, "seed": self.seed,
            "cpu_time": self.cpu_time, "device": self.device, "training": self.training,
        }  # fmt: skip


def available_cores() -> int:
    """Return the number of cores this process may use; in a container it can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
