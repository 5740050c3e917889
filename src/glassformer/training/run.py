"""A run: everything that decides what training does, in frozen dataclasses that are one TOML file.

`read_run` resolves a TOML text (or nothing) plus `--set optim.lr=3e-4` changes into a Run; `override` changes a run by
its sections. The resolved run is written into every checkpoint, so that a checkpoint records how it was made. The
sections are defined in `sections`.
"""

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glassformer.config import ConfigError, DecoderConfig, EncoderConfig, ModelConfig, Seq2SeqConfig, presets
from glassformer.config import replace as replace_model
from glassformer.config.schema import build, from_dict, merge_tables, to_dict
from glassformer.errors import nearest, require
from glassformer.training.data import tasks
from glassformer.training.sections import (
    Chat,
    Checkpoint,
    Data,
    Loop,
    Loss,
    Machine,
    Optim,
    Probe,
    Schedule,
    Start,
    rename_former,
    shortened,
)
from glassformer.training.tuning.section import Lora

__all__ = [
    "Chat",
    "Data",
    "Loop",
    "Lora",
    "Loss",
    "Machine",
    "Optim",
    "Probe",
    "Run",
    "Schedule",
    "Start",
    "override",
    "read_run",
    "run_to_dict",
    "with_model",
]

FORMAT = 1
Objective = Literal["next", "masked", "seq2seq"]
"""Next-token prediction, masked language modelling, or sequence to sequence."""


@dataclass(frozen=True)
class Run:
    """One training run: a model, its data, and how to train it. `gf.train(gf.Run(model))` trains it."""

    model: ModelConfig
    """The architecture: a preset with changes, or all fields of a config (see [model])."""
    data: Data = Data()
    """The text to train on and how it becomes tokens."""
    task: tasks.Repeat | tasks.Copy | tasks.Markov | tasks.ModularAddition | None = None
    """Parameters of the synthetic task that data.corpus names; none for a text."""
    optim: Optim = Optim()
    """The optimizer."""
    schedule: Schedule = Schedule()
    """The learning rate over the run."""
    loss: Loss = Loss()
    """Terms that are added to the cross-entropy."""
    loop: Loop = Loop()
    """The number of steps, the batch, and the intervals of validation, samples and checkpoints."""
    checkpoint: Checkpoint = Checkpoint()
    """How checkpoints are written."""
    machine: Machine = Machine()
    """The device, the dtypes, compilation and parallelism."""
    probe: Probe = Probe()
    """Measurements during training."""
    start: Start = Start()
    """The model to start from; without one, the run starts from fresh weights."""
    lora: Lora | None = None
    """Adapters to train instead of the weights; none trains the weights."""
    chat: Chat | None = None
    """How conversations become tokens; none trains on plain text."""
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
        self._check_start()
        self._check_chat()
        require(self.model.head is not None, "a model without a head predicts nothing: set model.head.")
        require(
            self.schedule.warmup < self.loop.steps,
            f"schedule.warmup={self.schedule.warmup} leaves nothing of loop.steps={self.loop.steps}: set a shorter "
            "warm-up, or more steps.",
        )

    def _check_task(self) -> None:
        is_task = self.data.corpus.startswith(tasks.PREFIX)
        require(
            not self.data.mix or (self.task is None and self.chat is None),
            "[[data.mix]] mixes texts, not synthetic tasks or conversations: leave one of them out.",
        )
        if self.task is None:
            require(not is_task, f"data.corpus={self.data.corpus!r} needs its task: make the run with read_run.")
            return
        require(
            is_task and tasks.named(self.data.corpus) is type(self.task),
            f"[task] is of {self.task.kind}, but data.corpus={self.data.corpus!r}: name it 'task:{self.task.kind}'.",
        )
        require(
            self.objective == "next",
            f"a task asks for next tokens, which a model of kind {to_dict(self.model)['kind']!r} does not predict: use "
            "a decoder.",
        )
        self.task.check(self.context)

    def _check_products(self) -> None:
        """Refuse float8 matmuls for feed-forwards and widths that the kernels do not support."""
        feedforward = self.model.feedforward
        if self.machine.products != "float8":
            return
        if feedforward.kind not in ("dense", "gated"):
            raise ConfigError(
                f"machine.products='float8' is for a dense or gated feed-forward, and the model's is "
                f"{feedforward.kind!r}: use machine.products='precision'."
            )
        for name, size in (("d_model", self.model.d_model), ("feedforward.d_ff", self.model.d_ff)):
            require(
                size % 16 == 0,
                f"model.{name}={size} is not a multiple of 16, as machine.products='float8' needs: change it, or use "
                "machine.products='precision'.",
            )

    def _check_start(self) -> None:
        started, machine = bool(self.start.model), self.machine
        require(started or self.lora is None, "[lora] adapts an existing model: name it in start.model (--from MODEL).")
        require(
            started or not self.data.add_tokens,
            f"data.add_tokens={list(self.data.add_tokens)} extends the tokenizer of an existing model: name that model "
            "in start.model (--from MODEL).",
        )
        require(
            not started or self.task is None,
            f"data.corpus={self.data.corpus!r} has tokens of its own, which {self.start.model} does not know: train on "
            "a text, or leave out start.model.",
        )
        if self.lora is None:
            return
        require(not self.optim.freeze, "[lora] freezes everything but the adapters: leave out optim.freeze.")
        require(self.optim.kind == "adamw", f"[lora] needs optim.kind='adamw', not {self.optim.kind!r}.")
        require(
            self.lora.quantize == "no" or machine.parallel != "fsdp",
            "lora.quantize='nf4' is not supported by machine.parallel='fsdp', which shards weights that are not "
            "quantised: use 'ddp', or lora.quantize='no'.",
        )
        require(
            self.lora.quantize == "no" or machine.compile != "yes",
            "lora.quantize='nf4' is not supported by machine.compile='yes': use 'auto' or 'no'.",
        )
        require(machine.products != "float8", "[lora] does not support machine.products='float8': use 'precision'.")

    def _check_chat(self) -> None:
        if self.chat is None:
            return
        require(self.objective == "next", f"[chat] needs a decoder, and model.kind is {to_dict(self.model)['kind']!r}.")
        require(self.task is None, f"[chat] and data.corpus={self.data.corpus!r} contradict each other: drop one.")
        if self.chat.loss == "dpo":
            rows, loss = self.loop.batch // self.loop.accumulate, self.loss
            require(
                rows % 2 == 0,
                f"chat.loss='dpo' needs pairs: loop.batch / loop.accumulate = {rows} must be even (a pair is two).",
            )
            require(
                not (loss.label_smoothing or loss.z_loss),
                "chat.loss='dpo' has no use for loss.label_smoothing and loss.z_loss: leave them out.",
            )

    @property
    def context(self) -> int:
        """Tokens per sequence: loop.context, or the length that the task fixes, or the model's max_len."""
        fixed = self.task.context if isinstance(self.task, tasks.ModularAddition) else None
        return self.loop.context or fixed or self.model.max_len or 0

    @property
    def objective(self) -> Objective:
        """The training objective, which the architecture determines."""
        match self.model:
            case DecoderConfig():
                return "next"
            case EncoderConfig():
                return "masked"
            case Seq2SeqConfig():
                return "seq2seq"
        raise TypeError(f"{type(self.model).__name__} is not one of the three kinds of models.")


SECTIONS: dict[str, type] = {
    "start": Start,
    "data": Data,
    "optim": Optim,
    "schedule": Schedule,
    "loss": Loss,
    "loop": Loop,
    "checkpoint": Checkpoint,
    "machine": Machine,
    "probe": Probe,
    "lora": Lora,
    "chat": Chat,
}
OPTIONAL = ("lora", "chat")
"""Sections that a run does not have unless its file does."""


PARTS = {*SECTIONS, "model", "task", "seed", "out", "format"}
"""Keys of the top level of a run file."""

Note = Callable[[str], None]


def read_run(text: str = "", changes: tuple[str, ...] = (), source: str = "the run", note: Note | None = None) -> Run:
    """Return the run of a TOML text with `section.field=value` changes.

    [model] is a whole config, or `preset = "nano"` with fields to change (`n_layers = 2`, `attention__bias = false`).
    `note` receives one sentence for each value that was adjusted to the others.
    """
    changed: dict[str, Any] = {}
    for change in changes:
        _apply_change(changed, change)
    return _resolve(read_toml(text, source), changed, source, note)


def override(run: Run | str, changes: Mapping[str, Any], source: str = "the run", note: Note | None = None) -> Run:
    """Return a run, given as such or as TOML text, with some of its parts changed.

    `changes` holds parts by name: `{"loop": {"steps": 5}, "seed": 1}`. Fields of a section that are not named keep
    their values. A section may also be given whole, as a dataclass: `{"loop": Loop(steps=5)}`.
    """
    data = read_toml(run, source) if isinstance(run, str) else run_to_dict(run)
    plain = {name: to_dict(value) if dataclasses.is_dataclass(value) else value for name, value in changes.items()}
    whole = {name: plain[name] for name, value in changes.items() if dataclasses.is_dataclass(value)}
    if "corpus" in (plain.get("data") or {}) and "task" not in plain:
        data.pop("task", None)  # the parameters of the former corpus
    return _resolve(data | whole, plain, source, note)


def read_toml(text: str, source: str) -> dict[str, Any]:
    """Return the tables of a run file. Raise ConfigError if it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not readable TOML: {error}.") from None


def _resolve(data: dict[str, Any], changed: Mapping[str, Any], source: str, note: Note | None) -> Run:
    """Return the run of the tables `data`, over which the tables `changed` take precedence."""
    precedence = {field: 2 * _holds(changed, field) or int(_holds(data, field)) for field in (WARMUP, STEPS)}
    started = any(isinstance(given := tables.get("start"), dict) and given.get("model") for tables in (data, changed))
    data = _with_changes(data if started else NANO | data, changed, source)
    for key in data:
        if key not in PARTS:
            raise ConfigError(f"{source}: {key} is not a part of a run.{nearest(key, PARTS)}")
    rename_former(data)
    if started:
        from glassformer.training.tuning.start import fill_in  # needs torch: it reads the config of a model

        data = fill_in(data, build(Start, data["start"], "start"))
    parts: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        if name in OPTIONAL and name not in data:
            continue
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
        parts["schedule"] = shortened(parts["schedule"], parts["loop"].steps, note)
    return Run(model=_read_model(data["model"]), **parts)


NANO = {"model": {"preset": "nano"}}
"""The model of a run file without [model], and what its fields change."""


STEPS, WARMUP = ("loop", "steps"), ("schedule", "warmup")


def _holds(data: Mapping[str, Any], field: tuple[str, str]) -> bool:
    section = data.get(field[0])
    return isinstance(section, dict) and field[1] in section


def _read_task(corpus: str, given: Any, source: str) -> tasks.Task | None:
    if not corpus.startswith(tasks.PREFIX):
        require(
            given is None,
            f"{source}: [task] is for a synthetic task, but data.corpus={corpus!r} is none: name one, such as "
            "data.corpus='task:repeat', or leave [task] out.",
        )
        return None
    kind = tasks.named(corpus)
    section = {} if given is None else given
    require(isinstance(section, dict), f"{source}: task must be a table.")
    require(
        section.get("kind", kind.kind) == kind.kind,
        f"{source}: task.kind={section.get('kind')!r}, but data.corpus={corpus!r}: leave task.kind out.",
    )
    return build(kind, section, "task")


def _is_whole(model: Mapping[str, Any]) -> bool:
    """Return True if [model] describes a model without a preset."""
    return "preset" not in model and ("kind" in model or model.keys() >= {"d_model", "attention", "feedforward"})


def _read_model(data: Any) -> ModelConfig:
    require(isinstance(data, dict), "model must be a table.")
    if _is_whole(data):
        return from_dict(data)
    data = NANO["model"] | data
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
    return from_dict(merge_tables(to_dict(made), tables)) if tables else made


def _with_changes(data: dict[str, Any], changed: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the tables of a run with other values for some fields. A preset replaces a whole model."""
    out = dict(data)
    for name, value in changed.items():
        held = out.get(name, {})
        if not isinstance(value, Mapping):
            out[name] = value
        elif not isinstance(held, dict):
            raise ConfigError(f"{source}: {name} is not a table.")
        elif name == "model" and "preset" in value and _is_whole(held):
            out[name] = dict(value)
        else:
            out[name] = merge_tables(held, value)
    return out


def _apply_change(data: dict[str, Any], change: str) -> None:
    """Apply `optim.lr=3e-4`. The value is read as TOML, and as plain text if it is not TOML."""
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


def run_to_dict(run: Run) -> dict[str, Any]:
    """Return the whole run as a nested dict, for TOML and JSON."""
    out: dict[str, Any] = {"format": FORMAT, "seed": run.seed, "out": run.out}
    for name in (*SECTIONS, "task"):
        if (section := getattr(run, name)) is not None:
            out[name] = to_dict(section)
    out["model"] = to_dict(run.model)
    return out


def with_model(run: Run, **changes: Any) -> Run:
    """Return the run with some model fields changed, such as the vocabulary, which only the tokenizer determines."""
    return dataclasses.replace(run, model=replace_model(run.model, **changes))
