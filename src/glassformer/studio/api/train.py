"""Train view: the fields of a run file, starting a run, and its events."""

import dataclasses
import time
import types
import typing
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import anyio
import pydantic

from glassformer import sizing as size
from glassformer.config import DecoderConfig, ModelConfig, presets, to_toml
from glassformer.errors import nearest
from glassformer.studio import schema
from glassformer.studio.errors import StudioError
from glassformer.studio.events import encode_event
from glassformer.studio.settings import LIMITS, Limits
from glassformer.studio.training import Run, TrainingRuns, parse

MODEL_FIELDS: dict[str, tuple[type, str]] = {
    "n_layers": (int, "Number of blocks."),
    "d_model": (int, "D: width of the residual stream."),
    "n_heads": (int, "H: query heads; must divide the width."),
    "n_kv_heads": (int, "G: key/value heads; must divide the query heads."),
    "d_ff": (int, "F: width of the feed-forward layer."),
    "max_len": (int, "Maximum context length."),
    "dropout": (float, "Dropout probability during training."),
}
EDITABLE = {
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
"""Sections of a run file and their fields that the page may set; None: all of them. No path is among them."""
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
"""Defaults that differ from the command line: short runs with frequent evaluations."""
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
"""Lowest and highest value of each number, within what the dataclasses of the run accept (checked by a test)."""
MAIN = ("model.n_layers", "model.d_model", "model.n_heads", "model.max_len", "loop.steps", "loop.batch", "optim.lr",
        "data.tokenizer")  # fmt: skip
"""Fields that the form shows first."""
PRESETS = ("nano", "llama_tiny", "moe_tiny", "shakespeare")
CORPORA = ("shakespeare", "embedded")
TASKS = ("task:repeat", "task:copy", "task:markov")
TITLES = {
    "shakespeare": "tiny Shakespeare",
    "embedded": "Python's manual",
    "task:repeat": "task: continue a repetition",
    "task:copy": "task: copy a block",
    "task:markov": "task: a Markov chain",
}


@dataclasses.dataclass(frozen=True)
class RunField:
    """One field of a run file, as the form shows it."""

    name: str
    kinds: tuple[type, ...]
    default: Any
    choices: tuple[Any, ...] = ()
    help: str = ""
    optional: bool = False

    def to_dict(self) -> dict[str, Any]:
        kinds = {bool: "bool", int: "int", float: "float", str: "text"}
        kind = "choice" if self.choices else kinds[self.kinds[0]]
        section, _, _ = self.name.rpartition(".")
        low, high = RANGES.get(self.name, (None, None))
        out = {"name": self.name, "section": section or "run", "kind": kind, "default": self.default, "doc": self.help}
        limits = {"low": low, "high": high, "optional": self.optional, "main": self.name in MAIN}
        return {**out, **limits, "choices": list(self.choices)}

    @property
    def annotation(self) -> Any:
        """The type that pydantic validates: the choices, or numbers within their range."""
        if self.choices:
            annotation: Any = Literal[self.choices]
        else:
            low, high = RANGES.get(self.name, (None, None))
            annotation = Annotated[typing.Union[self.kinds], pydantic.Field(ge=low, le=high)]  # noqa: UP007
        return annotation | None if self.optional else annotation


def parse_fields(given: dict[str, Any], preset: str) -> dict[str, Any]:
    """Validate the fields that a request sets. Constraints between fields are checked by the run's dataclasses."""
    known = fields(preset)
    for name in given:
        if name not in known:
            raise StudioError(f"{name[:60]!r} is not a field that can be set here.{nearest(name[:60], known)}")
    # Names such as loop.steps are no Python identifiers, so they are aliases.
    columns: dict[str, Any] = {
        f"field_{i}": (field.annotation, pydantic.Field(default=None, alias=name))
        for i, (name, field) in enumerate(known.items())
        if name in given
    }
    model = pydantic.create_model("RunFields", __base__=schema.ApiRequest, **columns)
    return model.model_validate(given).model_dump(by_alias=True)


def fields(preset: str = "nano") -> dict[str, RunField]:
    """Return every field that may be set, from the dataclasses of the run, with their docstrings as help."""
    from glassformer.training.fields import field_docs
    from glassformer.training.run import SECTIONS

    base = presets.get(preset)
    values = {name: _model_value(base, name) for name in MODEL_FIELDS}
    out = {
        f"model.{name}": RunField(f"model.{name}", (kind,), values[name], (), help)
        for name, (kind, help) in MODEL_FIELDS.items()
        if values[name] is not None
    }
    for section, editable in EDITABLE.items():
        cls: Any = SECTIONS[section]
        hints, docs = typing.get_type_hints(cls), field_docs(cls)
        for field in dataclasses.fields(cls):
            is_list = typing.get_origin(hints[field.name]) is tuple  # the form has no control for lists
            if is_list or (editable is not None and field.name not in editable):
                continue
            name = f"{section}.{field.name}"
            default = DEFAULTS.get(name, field.default)
            kinds, choices, optional = _kinds(hints[field.name])
            if name == "data.tokenizer":
                choices = TOKENIZERS
            out[name] = RunField(name, kinds, default, choices, docs.get(field.name, ""), optional)
    out["seed"] = RunField("seed", (int,), 0, (), "Seed of weights, data order and dropout.")
    return out


def _model_value(config: ModelConfig, name: str) -> Any:
    value = getattr(config, name)
    return None if name == "d_ff" and not value else value


def _kinds(hint: Any) -> tuple[tuple[type, ...], tuple[Any, ...], bool]:
    """Return (types, choices, may be None) of an annotation."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [option for option in options if option is not type(None)]
    if typing.get_origin(plain[0]) is Literal:
        return (str,), typing.get_args(plain[0]), len(plain) < len(options)
    return tuple(plain), (), len(plain) < len(options)


def form(training_runs: TrainingRuns, preset: str = "nano") -> dict[str, Any]:
    """Return everything that the form of the page needs."""
    limits = training_runs.limits
    maxima = {"parameters": limits.parameters, "steps": limits.training_steps, "upload_bytes": limits.upload_bytes}
    corpora = [{"name": name, "title": TITLES.get(name, name), "bytes": None} for name in (*CORPORA, *TASKS)]
    sizes = [_preset(name) for name in PRESETS]
    return {
        "preset": preset,
        "presets": sizes,
        "corpora": corpora + training_runs.corpora(),
        "fields": [field.to_dict() for field in fields(preset).values()],
        "limits": maxima,
    }


def _preset(name: str) -> dict[str, Any]:
    config = presets.get(name)
    values = {f"model.{field}": _model_value(config, field) for field in MODEL_FIELDS}
    return {
        "name": name,
        "parameters": size.count(config),
        "values": {k: v for k, v in values.items() if v is not None},
    }


def start(training_runs: TrainingRuns, request: schema.Train) -> dict[str, Any]:
    """Check a run as the command line does, predict its memory, and start it."""
    from glassformer.training.run import read_run

    if not isinstance(presets.get(request.preset), DecoderConfig):
        raise StudioError(f"{request.preset} is not a decoder: the studio trains models that predict the next token.")
    path = _corpus(training_runs, request.corpus)
    spec: dict[str, Any] = {
        "out": "out",
        "data": {"corpus": path, "cache": "tokens"},
        "model": {"preset": request.preset},
    }
    for name, value in {**DEFAULTS, **parse_fields(request.fields, request.preset)}.items():
        section, _, field = name.rpartition(".")
        (spec.setdefault(section, {}) if section else spec)[field] = "none" if value is None else value
    _adjust_defaults(spec, request.fields)
    run = read_run(to_toml(spec), source="the run")
    facts = _predict_size(run, training_runs.limits)
    facts |= {"name": request.name, "corpus": request.corpus, "preset": request.preset, "fields": request.fields}
    return {"run": training_runs.start(to_toml(spec), facts).id, **facts}


def _adjust_defaults(spec: dict[str, Any], given: dict[str, Any]) -> None:
    """Shorten the default warm-up of a short run, and drop the token cache of a synthetic task."""
    steps = spec["loop"]["steps"]
    if "schedule.warmup" not in given and isinstance(steps, int):
        spec["schedule"]["warmup"] = min(spec["schedule"]["warmup"], max(0, steps - 1))
    if spec["data"]["corpus"].startswith("task:"):
        spec["data"].pop("cache", None)


def _corpus(training_runs: TrainingRuns, name: str) -> str:
    """Return the value of data.corpus for a corpus that a page names. Only names are accepted, never paths."""
    if name in CORPORA or name in TASKS:
        return name
    path = training_runs.corpus(name)
    if path is None:
        known = [*CORPORA, *TASKS, *(corpus["name"] for corpus in training_runs.corpora())]
        raise StudioError(f"there is no corpus {name[:60]!r}.{nearest(name[:60], known).replace('Fields', 'Corpora')}")
    return str(path.resolve())


def _predict_size(run: Any, limits: Limits) -> dict[str, Any]:
    """Return parameters and memory of a run, as `glass size` counts them. Raises StudioError above the limits."""
    from glassformer.training.forecast import forecast

    found = forecast(run)
    config, loop = found.run.model, run.loop
    if loop.steps > limits.training_steps:
        raise StudioError(f"loop.steps={loop.steps} exceeds the limit of {limits.training_steps:,}: use `glass train`.")
    if config.n_layers > 200 or max(config.d_model, config.d_ff, config.vocab_size, run.context) > 10**6:
        raise StudioError("this model is too large for the studio: use `glass train`.")
    count = size.count(config)
    if count > limits.parameters:
        raise StudioError(
            f"{count:,} parameters exceed the limit of {limits.parameters:,}: use a smaller model, or `glass train`."
        )
    memory = size.training_memory(config, loop.batch, run.context, "float32", run.optim.kind, options=found.options)
    if memory.peak > limits.training_bytes:
        raise StudioError(
            f"this run needs {memory.peak / 1e9:.1f} GB, the limit is {limits.training_bytes / 1e9:g} GB: use smaller "
            "values for batch, context or model."
        )
    return {"parameters": count, "predicted_bytes": memory.peak, "steps": loop.steps}


POLL_SECONDS = 0.05
MEMORY_SECONDS = 1.0


async def follow(training_runs: TrainingRuns, run: Run, after: int) -> AsyncIterator[bytes]:
    """Yield the events after offset `after`, `memory` every second, and `state` when the process has ended.

    The start event of a resumed run contains the step from which it continues: later steps are sent again.
    """
    offset, memory_sent = after, float("-inf")
    while True:
        state = training_runs.state(run)  # read first, so that the last events of an ended run are sent
        parts, offset = _new_events(run, offset)
        if parts:
            yield b"".join(parts)
        if not parts and state not in ("running", "pausing", "stopping"):
            yield encode_event("state", training_runs.describe(run))
            return
        if anyio.current_time() - memory_sent >= MEMORY_SECONDS:
            memory_sent = anyio.current_time()
            yield encode_event("memory", _memory(run))
        await anyio.sleep(0.0 if parts else POLL_SECONDS)


def _memory(run: Run) -> dict[str, Any]:
    meta, memory = run.meta(), run.memory()
    peaks = [peak for peak in (meta.get("peak_bytes"), memory and memory["peak"]) if peak]
    since = time.time() - float(meta.get("created") or time.time())
    return {
        "seconds": since,
        "bytes": memory and memory["rss"],
        "peak": max(peaks, default=None),
        "predicted": meta.get("predicted_bytes"),
    }


def _new_events(run: Run, offset: int, chunk: int = 1 << 18) -> tuple[list[bytes], int]:
    """Return the encoded events of complete lines after `offset`, and the offset after them."""
    try:
        with run.events.open("rb") as file:
            file.seek(offset)
            data = file.read(chunk)
    except OSError:
        return [], offset
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and len(data) == chunk:
        whole = data  # an event is never that long
    parts = []
    for line in whole.splitlines(keepends=True):
        offset += len(line)
        event = parse(line)
        if event is not None:
            parts.append(encode_event(event["event"], event, str(offset)))
    return parts, offset
