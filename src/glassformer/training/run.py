"""A run: everything that decides what training does, in frozen dataclasses that are one TOML file.

`read_run` resolves a TOML text (or nothing) plus `--set optim.lr=3e-4` changes into a RunConfig. The resolved run is
written into every checkpoint, so that a checkpoint records how it was made. The sections are in `sections`.
"""

import dataclasses
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from glassformer.config import ConfigError, DecoderConfig, Dense, EncoderConfig, ModelConfig, Seq2SeqConfig, presets
from glassformer.config import replace as replace_model
from glassformer.config.errors import nearest, require
from glassformer.config.schema import build, from_dict, to_dict
from glassformer.training.data import tasks
from glassformer.training.sections import Data, Loop, Loss, Machine, Optim, Probe, Schedule

__all__ = [
    "Data",
    "Loop",
    "Loss",
    "Machine",
    "Optim",
    "Probe",
    "RunConfig",
    "Schedule",
    "read_run",
    "run_to_dict",
    "with_model",
]

FORMAT = 1


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    model: ModelConfig
    """The architecture: a preset with changes, or all fields of a config (see [model])."""
    data: Data = Data()
    task: tasks.Repeat | tasks.Copy | tasks.Markov | tasks.ModularAddition | None = None
    """Parameters of the synthetic task that data.corpus names; none for a text."""
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    loss: Loss = Loss()
    loop: Loop = Loop()
    machine: Machine = Machine()
    probe: Probe = Probe()
    seed: int = 0
    """Seed of the initial weights, of the order of the data and of dropout."""
    out: str = ""
    """Folder of the run: checkpoints, log.jsonl and the resolved run.toml. Default: a new folder runs/CORPUS-N, such
    as runs/shakespeare-1. In both cases `glass train` points the link runs/latest to it."""

    def __post_init__(self) -> None:
        limit = self.model.max_len
        require(self.context > 0, "loop.context is not set and the model has no max_len: give one of them.")
        require(
            limit is None or self.context <= limit,
            f"loop.context={self.context} exceeds the model's max_len={limit}: shorten it, or raise max_len.",
        )
        self._check_task()
        self._check_products()
        require(self.model.head is not None, "a model without a head predicts nothing: set model.head.")
        require(
            self.schedule.warmup < self.loop.steps,
            f"schedule.warmup={self.schedule.warmup} leaves nothing of loop.steps={self.loop.steps}: set a shorter "
            "warm-up, or more steps.",
        )

    def _check_task(self) -> None:
        kind = tasks.named(self.data.corpus)
        if self.task is None:
            require(kind is None, f"data.corpus={self.data.corpus!r} needs its task: make the run with read_run.")
            return
        require(
            kind is type(self.task),
            f"[task] is of {self.task.kind}, but data.corpus={self.data.corpus!r}: name it 'task:{self.task.kind}'.",
        )
        require(
            self.objective == "next",
            f"a task asks for next tokens, which a model of kind {to_dict(self.model)['kind']!r} does not predict: use "
            "a decoder.",
        )
        self.task.check(self.context)

    def _check_products(self) -> None:
        """Products in 8 bits are written for one shape of feed-forward, and for dimensions that a GPU can take."""
        feedforward = self.model.feedforward
        if self.machine.products != "float8":
            return
        if not isinstance(feedforward, Dense):
            raise ConfigError(
                f"machine.products='float8' is for a dense feed-forward, and the model's is {feedforward.kind!r}: use "
                "machine.products='precision'."
            )
        for name, size in (("d_model", self.model.d_model), ("feedforward.d_ff", feedforward.d_ff)):
            require(
                size % 16 == 0,
                f"model.{name}={size} is not a multiple of 16, as machine.products='float8' needs: change it, or use "
                "machine.products='precision'.",
            )

    @property
    def context(self) -> int:
        """Tokens per sequence: given, fixed by the task, or the model's max_len."""
        fixed = self.task.context if isinstance(self.task, tasks.ModularAddition) else None
        return self.loop.context or fixed or self.model.max_len or 0

    @property
    def objective(self) -> str:
        """Decided by the architecture: next token, masked language model, or sequence to sequence."""
        kinds = {DecoderConfig: "next", EncoderConfig: "masked", Seq2SeqConfig: "seq2seq"}
        return kinds[type(self.model)]


SECTIONS: dict[str, type] = {
    "data": Data,
    "optim": Optim,
    "schedule": Schedule,
    "loss": Loss,
    "loop": Loop,
    "machine": Machine,
    "probe": Probe,
}


PARTS = {*SECTIONS, "model", "task", "seed", "out", "format"}
"""What may stand at the top level of a run file."""

Note = Callable[[str], None]


def read_run(
    text: str = "", changes: tuple[str, ...] = (), source: str = "the run", note: Note | None = None
) -> RunConfig:
    """A run from TOML text and `section.field=value` changes.

    [model] is a whole config, or `preset = "nano"` with fields to change (`n_layers = 2`, `attention__bias = false`).
    `note` receives one sentence for each value that was adjusted to the others.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not readable TOML: {error}.") from None
    data.setdefault("model", {"preset": "nano"})
    precedence = {field: int(_holds(data, field)) for field in (WARMUP, STEPS)}
    changed: dict[str, Any] = {}
    for change in changes:
        _apply_change(data, change)
        _apply_change(changed, change)
    precedence |= {field: 2 for field in precedence if _holds(changed, field)}
    for key in data:
        if key not in PARTS:
            raise ConfigError(f"{source}: {key} is not a part of a run.{nearest(key, PARTS)}")
    parts: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        section = data.get(name, {})
        require(isinstance(section, dict), f"{source}: {name} must be a table.")
        parts[name] = build(kind, section, name)
    parts["task"] = _read_task(parts["data"].corpus, data.get("task"), source)
    for name, kind in (("seed", int), ("out", str)):
        if name in data:
            require(
                type(data[name]) is kind,
                f"{source}: {name}={data[name]!r} must be {'a whole number' if kind is int else 'text'}.",
            )
            parts[name] = data[name]
    if precedence[STEPS] > precedence[WARMUP]:
        parts["schedule"] = _shortened(parts["schedule"], parts["loop"].steps, note)
    return RunConfig(model=_read_model(data["model"]), **parts)


STEPS, WARMUP = ("loop", "steps"), ("schedule", "warmup")


def _holds(data: dict[str, Any], field: tuple[str, str]) -> bool:
    section = data.get(field[0])
    return isinstance(section, dict) and field[1] in section


def _shortened(schedule: Schedule, steps: int, note: Note | None) -> Schedule:
    """A schedule whose warm-up fits a number of steps that was set with more authority than the warm-up was.

    A value on the command line outranks the run file, which outranks the default. Two values of one rank that
    contradict each other are refused by RunConfig.
    """
    if schedule.warmup < steps:
        return schedule
    shorter = dataclasses.replace(schedule, warmup=steps // 10)
    if note is not None:
        note(
            f"schedule.warmup is shortened from {schedule.warmup:,} to {shorter.warmup:,}, a tenth of "
            f"loop.steps={steps}; set schedule.warmup to choose another length."
        )
    return shorter


def _read_task(corpus: str, given: Any, source: str) -> tasks.Task | None:
    kind = tasks.named(corpus)
    if kind is None:
        require(
            given is None,
            f"{source}: [task] is for a synthetic task, but data.corpus={corpus!r} is none: name one, such as "
            "data.corpus='task:repeat', or leave [task] out.",
        )
        return None
    section = {} if given is None else given
    require(isinstance(section, dict), f"{source}: task must be a table.")
    require(
        section.get("kind", kind.kind) == kind.kind,
        f"{source}: task.kind={section.get('kind')!r}, but data.corpus={corpus!r}: leave task.kind out.",
    )
    return build(kind, section, "task")


def _read_model(data: Any) -> ModelConfig:
    require(isinstance(data, dict), "model must be a table.")
    if "preset" not in data:
        return from_dict(data)
    changes = {key: None if value == "none" else value for key, value in data.items() if key != "preset"}
    plain, tables = {}, {}  # what a preset is asked for, and what changes the kind of a part
    for key, value in changes.items():
        if not isinstance(value, dict):
            plain[key] = value
        elif "kind" in value or any(isinstance(inner, dict) for inner in value.values()):
            tables[key] = value
        else:
            plain |= {f"{key}__{name}": inner for name, inner in value.items()}
    made = presets.get(data["preset"], **plain)
    return from_dict(_merge(to_dict(made), tables)) if tables else made


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged, unless their kind changes: then the new one stands alone."""
    out = dict(base)
    for key, value in changes.items():
        held = out.get(key)
        if isinstance(held, dict) and isinstance(value, dict) and value.get("kind") in (None, held.get("kind")):
            out[key] = _merge(held, value)
        else:
            out[key] = value
    return out


def _apply_change(data: dict[str, Any], change: str) -> None:
    """`optim.lr=3e-4`: the value is read as TOML, and as plain text when it is none."""
    key, equals, text = change.partition("=")
    require(bool(equals) and bool(key.strip()), f"--set {change!r} must read section.field=value.")
    try:
        value = tomllib.loads(f"x = {text.strip()}")["x"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    *path, last = key.strip().split(".")
    table = data
    for name in path:
        table = table.setdefault(name, {})
        require(isinstance(table, dict), f"--set {change!r}: {name} is not a table.")
    table[last] = value


def run_to_dict(run: RunConfig) -> dict[str, Any]:
    """The whole run as a nested dict, for TOML and JSON."""
    out: dict[str, Any] = {"format": FORMAT, "seed": run.seed, "out": run.out}
    for name in SECTIONS:
        out[name] = to_dict(getattr(run, name))
    if run.task is not None:
        out["task"] = to_dict(run.task)
    out["model"] = to_dict(run.model)
    return out


def with_model(run: RunConfig, **changes: Any) -> RunConfig:
    """The run with some model fields changed: the vocabulary is known only once the tokenizer is."""
    return dataclasses.replace(run, model=replace_model(run.model, **changes))
