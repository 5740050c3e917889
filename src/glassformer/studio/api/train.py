"""Train: which fields a run has, starting one, and its events as they come."""

import ast
import asyncio
import dataclasses
import inspect
import textwrap
import time
import types
import typing
from collections.abc import AsyncIterator
from typing import Any, Literal

from glassformer import sizing as size
from glassformer.config import DecoderConfig, ModelConfig, presets, to_toml
from glassformer.config.errors import nearest
from glassformer.studio import schema
from glassformer.studio.errors import StudioError
from glassformer.studio.events import frame
from glassformer.studio.settings import LIMITS, Limits
from glassformer.studio.training import Run, Trainings, parse

MODEL_FIELDS: dict[str, tuple[type, str]] = {
    "n_layers": (int, "Blocks."),
    "d_model": (int, "D: width of the stream."),
    "n_heads": (int, "H: query heads; must divide the width."),
    "n_kv_heads": (int, "G: key/value heads; must divide the heads."),
    "d_ff": (int, "F: width of the feed-forward."),
    "max_len": (int, "Longest context."),
    "dropout": (float, "Share of numbers dropped while training."),
}
OPEN = {
    "data": ("tokenizer", "vocab_size", "validation", "order"),
    "optim": None,
    "schedule": None,
    "loss": ("label_smoothing", "z_loss"),
    "loop": (
        "steps", "batch", "accumulate", "context", "eval_every", "eval_batches", "sample_every", "log_every",
        "checkpoint_every",
    ),
    "probe": None,
}  # fmt: skip
"""Sections of a run and the fields of each that a page may set; None: all of them. No path is among them."""
TOKENIZERS = ("char", "byte", "bpe")
DEFAULTS: dict[str, Any] = {
    "loop.steps": 500,
    "loop.eval_every": 50,
    "loop.eval_batches": 8,
    "loop.log_every": 1,
    "loop.sample_every": 100,
    "loop.checkpoint_every": 50,
    "schedule.warmup": 20,
    "probe.every": 50,
    "probe.heads": True,
}
"""Where the studio starts from other values than the command line: short runs with much to see."""
RANGES: dict[str, tuple[float, float | None]] = {
    **{f"model.{name}": (1, None) for name in ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "max_len")},
    "model.dropout": (0, 0.99),
    "data.vocab_size": (256, 100_000),
    "data.validation": (0.001, 0.9),
    "optim.lr": (1e-8, 10),
    "optim.muon_lr": (1e-8, 10),
    **{f"optim.{name}": (0, 0.99999) for name in ("beta1", "beta2", "momentum")},
    "optim.weight_decay": (0, 10),
    "optim.clip": (1e-6, 1e6),
    "optim.ema": (1e-6, 0.999999),
    "schedule.warmup": (0, None),
    "schedule.floor": (0, 1),
    "schedule.decay": (0.001, 1),
    "loss.label_smoothing": (0, 0.99),
    "loss.z_loss": (0, 1),
    "loop.steps": (1, LIMITS.training_steps),
    **{f"loop.{name}": (1, 4096) for name in ("batch", "accumulate", "context", "eval_batches")},
    **{f"loop.{name}": (1, LIMITS.training_steps) for name in ("eval_every", "log_every", "checkpoint_every")},
    "loop.sample_every": (0, LIMITS.training_steps),
    "probe.every": (0, LIMITS.training_steps),
    "seed": (0, 2**32 - 1),
}
"""Lowest and highest of each number, inside what the run's dataclasses accept (a test holds them to it)."""
MAIN = ("model.n_layers", "model.d_model", "model.n_heads", "model.max_len", "loop.steps", "loop.batch", "optim.lr",
        "data.tokenizer")  # fmt: skip
"""Shown first."""
PRESETS = ("nano", "llama_tiny", "moe_tiny", "shakespeare")
CORPORA = ("shakespeare", "embedded")
TASKS = ("task:repeat", "task:copy", "task:markov")
TITLES = {
    "shakespeare": "tiny Shakespeare",
    "embedded": "Python's manual",
    "task:repeat": "task: go on with a repetition",
    "task:copy": "task: copy a block",
    "task:markov": "task: a Markov chain",
}


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a run as a form shows it."""

    name: str
    kinds: tuple[type, ...]
    default: Any
    choices: tuple[Any, ...] = ()
    help: str = ""
    optional: bool = False

    def to_dict(self) -> dict[str, Any]:
        words = {bool: "bool", int: "int", float: "float", str: "text"}
        kind = "choice" if self.choices else words[self.kinds[0]]
        section, _, _ = self.name.rpartition(".")
        low, high = RANGES.get(self.name, (None, None))
        out = {"name": self.name, "section": section or "run", "kind": kind, "default": self.default, "doc": self.help}
        more = {"low": low, "high": high, "optional": self.optional, "main": self.name in MAIN}
        return {**out, **more, "choices": list(self.choices)}

    def read(self, value: Any) -> Any:
        """The value, of the right type and inside its range; what goes together the dataclasses check."""
        if value is None and self.optional:
            return "none"
        if self.choices:
            if value not in self.choices:
                raise StudioError(f"{self.name}={str(value)[:60]!r} is not known: use {', '.join(self.choices)}.")
            return value
        if float in self.kinds and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) not in self.kinds:
            raise StudioError(f"{self.name}={str(value)[:60]!r} has the wrong type: give {_A[self.kinds[0]]}.")
        low, high = RANGES.get(self.name, (None, None))
        if (low is not None and value < low) or (high is not None and value > high):
            upper = "or more" if high is None else f"to {high:g}"
            raise StudioError(f"{self.name}={str(value)[:60]} is outside its range: use {low:g} {upper}.")
        return value


_A = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def fields(preset: str = "nano") -> dict[str, Field]:
    """Every field that may be set, from the run's own dataclasses, with the strings under their fields as help."""
    from glassformer.training.run import SECTIONS

    base = presets.get(preset)
    held = {name: _held(base, name) for name in MODEL_FIELDS}
    out = {
        f"model.{name}": Field(f"model.{name}", (kind,), held[name], (), help)
        for name, (kind, help) in MODEL_FIELDS.items()
        if held[name] is not None
    }
    for section, open_fields in OPEN.items():
        cls: Any = SECTIONS[section]
        hints, docs = typing.get_type_hints(cls), _docs(cls)
        for field in dataclasses.fields(cls):
            if open_fields is not None and field.name not in open_fields:
                continue
            name = f"{section}.{field.name}"
            default = DEFAULTS.get(name, field.default)
            kinds, choices, optional = _kinds(hints[field.name])
            if name == "data.tokenizer":
                choices = TOKENIZERS
            out[name] = Field(name, kinds, default, choices, docs.get(field.name, ""), optional)
    out["seed"] = Field("seed", (int,), 0, (), "Of weights, order and dropout.")
    return out


def _held(config: ModelConfig, name: str) -> Any:
    value = getattr(config, name)
    return None if name == "d_ff" and not value else value


def _kinds(hint: Any) -> tuple[tuple[type, ...], tuple[Any, ...], bool]:
    """(types, choices, may be none) of an annotation."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [option for option in options if option is not type(None)]
    if typing.get_origin(plain[0]) is Literal:
        return (str,), typing.get_args(plain[0]), len(plain) < len(options)
    return tuple(plain), (), len(plain) < len(options)


def _docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    out: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(before.target, ast.Name)
            out[before.target.id] = " ".join(str(after.value.value).split())
    return out


def form(trainings: Trainings, preset: str = "nano") -> dict[str, Any]:
    """Everything the page's form needs."""
    limits = trainings.limits
    shown = {"parameters": limits.parameters, "steps": limits.training_steps, "upload_bytes": limits.upload_bytes}
    corpora = [{"name": name, "title": TITLES.get(name, name), "bytes": None} for name in (*CORPORA, *TASKS)]
    sizes = [_preset(name) for name in PRESETS]
    return {
        "preset": preset,
        "presets": sizes,
        "corpora": corpora + trainings.corpora(),
        "fields": [field.to_dict() for field in fields(preset).values()],
        "limits": shown,
    }


def _preset(name: str) -> dict[str, Any]:
    config = presets.get(name)
    values = {f"model.{field}": _held(config, field) for field in MODEL_FIELDS}
    return {
        "name": name,
        "parameters": size.count(config),
        "values": {k: v for k, v in values.items() if v is not None},
    }


def start(trainings: Trainings, asked: schema.Train) -> dict[str, Any]:
    """Check what was asked for as the command line would, forecast its memory, and start it."""
    from glassformer.training.run import read_run

    if not isinstance(presets.get(asked.preset), DecoderConfig):
        raise StudioError(f"{asked.preset} is no decoder: the studio trains models that predict the next token.")
    known = fields(asked.preset)
    path = _corpus(trainings, asked.corpus)
    spec: dict[str, Any] = {
        "out": "out",
        "data": {"corpus": path, "cache": "tokens"},
        "model": {"preset": asked.preset},
    }
    values = {**DEFAULTS, **asked.fields}
    for name, value in values.items():
        if name not in known:
            raise StudioError(f"{name[:60]!r} is not a field that can be set here.{nearest(name[:60], known)}")
        if name in DEFAULTS and name not in asked.fields:
            read: Any = value
        else:
            read = known[name].read(value)
        section, _, field = name.rpartition(".")
        (spec.setdefault(section, {}) if section else spec)[field] = read
    _shorten(spec, asked.fields)
    run = read_run(to_toml(spec), source="the run")
    facts = _forecast(run, trainings.limits)
    facts |= {"name": asked.name, "corpus": asked.corpus, "preset": asked.preset, "fields": asked.fields}
    return {"run": trainings.start(to_toml(spec), facts).id, **facts}


def _shorten(spec: dict[str, Any], given: dict[str, Any]) -> None:
    """A short run needs no long warm-up: the studio's own default gives way."""
    steps = spec["loop"]["steps"]
    if "schedule.warmup" not in given and isinstance(steps, int):
        spec["schedule"]["warmup"] = min(spec["schedule"]["warmup"], max(0, steps - 1))
    if spec["data"]["corpus"].startswith("task:"):
        spec["data"].pop("cache", None)


def _corpus(trainings: Trainings, name: str) -> str:
    """Return the value of data.corpus for a corpus that a page names. Only names are accepted, never paths."""
    if name in CORPORA or name in TASKS:
        return name
    path = trainings.corpus(name)
    if path is None:
        known = [*CORPORA, *TASKS, *(corpus["name"] for corpus in trainings.corpora())]
        raise StudioError(
            f"there is no corpus {name[:60]!r} here.{nearest(name[:60], known).replace('Fields', 'Corpora')}"
        )
    return str(path.resolve())


def _forecast(run: Any, limits: Limits) -> dict[str, Any]:
    """Parameters and memory of a run, as `glass size` counts them, inside the studio's limits."""
    from glassformer.training.forecast import forecast

    found = forecast(run)
    config, loop = found.run.model, run.loop
    if loop.steps > limits.training_steps:
        raise StudioError(f"loop.steps={loop.steps} is more than {limits.training_steps:,}: use `glass train`.")
    if config.n_layers > 200 or max(config.d_model, config.d_ff, config.vocab_size, run.context) > 10**6:
        raise StudioError("this model is larger than the studio trains: use `glass train`.")
    count = size.count(config)
    if count > limits.parameters:
        raise StudioError(
            f"{count:,} parameters are more than {limits.parameters:,}: make it smaller, or `glass train`."
        )
    memory = size.training_memory(config, loop.batch, run.context, "float32", run.optim.kind, options=found.options)
    if memory.peak > limits.training_bytes:
        raise StudioError(
            f"this needs {memory.peak / 1e9:.1f} GB, more than {limits.training_bytes / 1e9:g} GB: make batch, "
            "context or model smaller."
        )
    return {"parameters": count, "predicted_bytes": memory.peak, "steps": loop.steps}


POLL_SECONDS = 0.05
MEMORY_SECONDS = 1.0


async def follow(trainings: Trainings, run: Run, after: int) -> AsyncIterator[bytes]:
    """Events from offset `after` on; `memory` every second; at the process' end `state` and no more.

    A start event of a resumed run carries the step it goes on from: points after it come again.
    """
    loop, offset, told = asyncio.get_running_loop(), max(0, after), -MEMORY_SECONDS
    while True:
        state = trainings.state(run)  # asked before reading: what was written before the end is still sent
        parts, offset = _new_events(run, offset)
        if parts:
            yield b"".join(parts)
        if not parts and state not in ("running", "pausing", "stopping"):
            yield frame("state", trainings.describe(run))
            return
        if loop.time() - told >= MEMORY_SECONDS:
            told = loop.time()
            yield frame("memory", _memory(run))
        await asyncio.sleep(0.0 if parts else POLL_SECONDS)


def _memory(run: Run) -> dict[str, Any]:
    meta, held = run.meta(), run.memory()
    peaks = [peak for peak in (meta.get("peak_bytes"), held and held["peak"]) if peak]
    since = time.time() - float(meta.get("created") or time.time())
    return {
        "seconds": since,
        "bytes": held and held["rss"],
        "peak": max(peaks, default=None),
        "predicted": meta.get("predicted_bytes"),
    }


def _new_events(run: Run, offset: int, most: int = 1 << 18) -> tuple[list[bytes], int]:
    """Frames of whole lines after `offset`, and the offset after them."""
    try:
        with run.events.open("rb") as file:
            file.seek(offset)
            data = file.read(most)
    except OSError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and len(data) == most:
        whole = data  # no event is that long
    parts = []
    for line in whole.splitlines(keepends=True):
        offset += len(line)
        event = parse(line)
        if event is not None:
            parts.append(frame(event["event"], event, str(offset)))
    return parts, offset
