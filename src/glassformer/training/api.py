"""`gf.train`: the public function over sessions and the loop."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch

from glassformer.config import ConfigError, ModelConfig
from glassformer.model import Model
from glassformer.training.data.tasks import Task
from glassformer.training.loop import train as run_training
from glassformer.training.run import Run, override
from glassformer.training.sections import Chat, Checkpoint, Data, Loop, Loss, Machine, Optim, Probe, Schedule
from glassformer.training.session import open_session, read_run_file
from glassformer.training.tuning.section import Lora
from glassformer.weights import load, load_tokenizer

Event = dict[str, Any]
"""One line of log.jsonl: `event` is "start", "step", "validation", "sample", "probe" or "end"."""


class Overrides(TypedDict, total=False):
    """The parts of a run that `gf.train` can change: some fields of a section as a dict, or a whole section."""

    model: ModelConfig | Mapping[str, Any]
    data: Data | Mapping[str, Any]
    task: Task | Mapping[str, Any]
    optim: Optim | Mapping[str, Any]
    schedule: Schedule | Mapping[str, Any]
    loss: Loss | Mapping[str, Any]
    loop: Loop | Mapping[str, Any]
    checkpoint: Checkpoint | Mapping[str, Any]
    machine: Machine | Mapping[str, Any]
    probe: Probe | Mapping[str, Any]
    lora: Lora | Mapping[str, Any]
    chat: Chat | Mapping[str, Any]
    seed: int
    out: str | os.PathLike[str]


@dataclass(frozen=True)
class TrainResult:
    """What `gf.train` returns."""

    model: Model
    """The model after the last step, in evaluation mode; with `optim.ema`, the averaged weights. The model with the
    lowest validation loss is in `folder / "best"`."""
    tokenizer: Any
    """The `tokenizers.Tokenizer` of the run, as `gf.load_tokenizer` returns it."""
    history: list[Event]
    """The events of the run in order, as in log.jsonl: `[e["loss"] for e in history if e["event"] == "validation"]`."""
    folder: Path
    """The folder of the run: checkpoints, log.jsonl and the resolved run.toml."""

    def _repr_svg_(self) -> str | None:
        """Return the display in a notebook: the losses with their baselines, and the probes. None without a step."""
        from glassformer.lens.figures.training import training_curves

        steps = any(event.get("event") in ("step", "validation") for event in self.history)
        return training_curves(self.history).svg() if steps else None


def train(
    run: Run | str | os.PathLike[str],
    *,
    start: Model | str | os.PathLike[str] | None = None,
    listen: Callable[[Event], None] | None = None,
    force: bool = False,
    **overrides: Unpack[Overrides],
) -> TrainResult:
    """Train a model and return it with its tokenizer, the events of the run, and the folder of the run.

    `run` is a `gf.Run`, the path of a run file, or the path of a text file or a folder of texts, which is trained on
    with the default settings. `overrides` change parts of the run, and fields that are not named keep their values:
    `gf.train("run.toml", loop={"steps": 5}, optim={"lr": 3e-4}, seed=1, out="runs/short")`.

    `start` is a model to fine-tune, or the folder or name of one; fresh weights are trained without it. It brings its
    config and its tokenizer, and the defaults are those of fine-tuning: `gf.train("text.txt", start="bard")`.

    `listen` is called with each event while the run trains. `force` replaces the run that the folder `out` already
    holds. Raises GlassformerError for an invalid run, and KeyboardInterrupt after a checkpoint if interrupted.

    >>> result = gf.train("mytext.txt", loop={"steps": 2, "batch": 2, "context": 16}, out="runs/short")
    >>> result.model.config.n_layers
    4
    """
    history: list[Event] = []

    def record(event: Event) -> None:
        history.append(event)
        if listen is not None:
            listen(event)

    changes: dict[str, Any] = dict(overrides)
    if "out" in changes:
        changes["out"] = os.fspath(changes["out"])
    if start is not None:
        changes["start"] = {"model": _start(run, start)}

    def note(text: str) -> None:
        record({"event": "note", "text": text})

    resolved = _resolve(run, changes, note)
    session = open_session(resolved)
    for text in session.notes:
        note(text)
    state = run_training(session.run, session.data, record, baselines=None, force=force)
    folder = Path(state.run.out)
    trained = load(folder / "last", device=state.device, dtype=torch.float32)
    return TrainResult(trained, load_tokenizer(folder / "last"), history, folder)


def _start(run: Run | str | os.PathLike[str], start: Model | str | os.PathLike[str]) -> str:
    """Return the path or name of a model to start from. A model in memory is written to the cache if need be."""
    if isinstance(run, Run):
        raise ConfigError("a gf.Run has a model of its own, and start= brings another: give a run file or a text.")
    if isinstance(start, str | os.PathLike):
        return os.fspath(start)
    from glassformer.training.tuning.start import stored

    return stored(start)


def _resolve(run: Run | str | os.PathLike[str], changes: dict[str, Any], note: Callable[[str], None]) -> Run:
    if isinstance(run, Run):
        return override(run, changes, note=note)
    path = Path(run).expanduser()
    text = read_run_file(path)
    if text is not None:
        return override(text, changes, str(path), note)
    data = changes.get("data", {})
    fields = dataclasses.asdict(data) if isinstance(data, Data) else dict(data)
    return override("", changes | {"data": fields | {"corpus": str(path)}}, str(path), note)
