"""Loggers to which a run also sends its events: TensorBoard, Weights & Biases, MLflow, or a class of the user.

log.jsonl has every event, so a logger can lose nothing that `replay` does not send again. Each logger runs in a thread
of its own: one that raises, hangs or is not installed is switched off with one sentence, and training does not wait for
it. No logger receives keys or passwords from a run file; they come from the environment, as each logger documents.
"""

import importlib
import importlib.util
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from glassformer.errors import GlassformerError, install, nearest
from glassformer.files import write_atomically

Event = dict[str, Any]
IDS = "loggers.json"
"""File of a run with the ids under which its loggers know it, so that a resumed run continues their curves."""
CLOSE_SECONDS = 20.0
"""Longest time that the end of a run waits for its loggers."""
WAITING = 100_000
"""Largest number of events that wait for a logger. One that is further behind hangs."""
PROJECT = "glassformer"


class SinkError(GlassformerError):
    """A logger that does not exist, or a log that cannot be replayed."""


class Sink(Protocol):
    """What receives the events of a run. It is made with the folder of the run, in the thread in which it is used."""

    def start(self, run: dict[str, Any], step: int) -> None:
        """Begin. `run` is the run file as a dict; `step` is the number of steps that were done in earlier processes."""

    def log(self, event: Event) -> None:
        """Take one line of log.jsonl."""

    def close(self) -> None:
        """Write what is left."""


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of an event by name, such as `validation/loss`; nothing for an event without a curve."""
    if event["event"] not in ("step", "validation", "probe"):
        return {}
    return dict(_numbers(event["event"], {k: v for k, v in event.items() if k not in ("event", "step")}))


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(f"{name}/{key}", part)
    elif isinstance(value, float):
        yield name, value


class TensorBoard:
    """Writes RUN/tensorboard."""

    def __init__(self, folder: Path):
        self.folder = folder / "tensorboard"

    def start(self, run: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # hides what an earlier process wrote about steps that are repeated
        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1 if step else 0)

    def log(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self.writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """Writes RUN/wandb, offline unless the environment variable WANDB_MODE says otherwise."""

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self, run: dict[str, Any], step: int) -> None:
        import wandb

        known = read_id(self.folder, "wandb") if step else None
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=PROJECT,
            name=self.folder.name,
            id=known,
            resume="allow" if known else None,
            dir=str(self.folder),
            config=run,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        write_id(self.folder, "wandb", self.run.id)
        # wandb's own counter may not decrease, and the steps of a resumed run do: they are a value of their own
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, event: Event) -> None:
        if found := scalars(event):
            self.run.log({**found, "step": event["step"]})

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """Writes to MLFLOW_TRACKING_URI, or else to the database RUN/mlflow.db."""

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self, run: dict[str, Any], step: int) -> None:
        import mlflow

        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self.folder.absolute() / 'mlflow.db'}"
        self.client = mlflow.MlflowClient(tracking_uri=store)
        self.id = read_id(self.folder, "mlflow") if step else None
        if self.id is not None:
            return
        found = self.client.get_experiment_by_name(PROJECT)
        experiment = self.client.create_experiment(PROJECT) if found is None else found.experiment_id
        self.id = self.client.create_run(experiment, run_name=self.folder.name).info.run_id
        write_id(self.folder, "mlflow", self.id)
        for name, value in flat(run).items():
            self.client.log_param(self.id, name, value)

    def log(self, event: Event) -> None:
        for name, value in scalars(event).items():
            self.client.log_metric(self.id, name, value, step=event["step"])

    def close(self) -> None:
        self.client.set_terminated(self.id)


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables, such as those of a run file, as `section.field`."""
    out: dict[str, Any] = {}
    for name, value in tables.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return out


SINKS: dict[str, tuple[Callable[[Path], Sink], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "wandb": (WeightsAndBiases, "wandb"),
    "mlflow": (MLflow, "mlflow"),
}
"""Name -> its class, and the package that it needs."""


def check_names(names: Iterable[str]) -> None:
    """Refuse names that no logger can have. Whether a package is installed does not matter here."""
    listed = list(names)
    for name in listed:
        module, colon, attribute = name.partition(":")
        if name not in SINKS and not (colon and module and attribute.isidentifier()):
            known = nearest(name, SINKS, others="Loggers:")
            raise SinkError(f"loop.sinks has {name!r}, which is not a logger; a class is package.module:Class.{known}")
        if listed.count(name) > 1:
            raise SinkError(f"loop.sinks has {name!r} twice: leave one out.")


def make_sink(name: str, folder: Path) -> Sink:
    """Return the logger of a name."""
    if name in SINKS:
        kind, package = SINKS[name]
        if importlib.util.find_spec(package) is None:
            how = install("logs") if name == "tensorboard" else f"run pip install {package}"
            raise SinkError(f"{package} is not installed: {how}")
        return kind(folder)
    module, _, attribute = name.partition(":")
    sink: Sink = getattr(importlib.import_module(module), attribute)(folder)
    return sink


def read_id(folder: Path, name: str) -> str | None:
    """Return the id under which a logger knows a run; None if there is none."""
    try:
        found = json.loads((folder / IDS).read_text(encoding="utf-8")).get(name)
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


_IDS_LOCK = threading.Lock()


def write_id(folder: Path, name: str, id: str) -> None:
    """Store the id under which a logger knows a run."""
    with _IDS_LOCK:  # the loggers of a run start at the same time
        try:
            known = json.loads((folder / IDS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
        write_atomically(folder / IDS, (json.dumps({**known, name: str(id)}) + "\n").encode())


class _Worker:
    """One logger and its thread."""

    def __init__(self, name: str, folder: Path, run: dict[str, Any], step: int):
        self.name, self.folder, self.run, self.step = name, folder, run, step
        self.events: queue.Queue[Event | None] = queue.Queue()
        self.problem: str | None = None
        self.thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            sink = make_sink(self.name, self.folder)
            sink.start(self.run, self.step)
            while (event := self.events.get()) is not None:
                if self.problem is not None:
                    return
                sink.log(event)
            sink.close()
        except BaseException as error:  # SystemExit too: nothing in a logger may end training
            self.problem = self.problem or " ".join(str(error).split()) or type(error).__name__

    def log(self, event: Event) -> None:
        if self.problem is None:
            self.events.put(event)
            if self.events.qsize() > WAITING:
                self.problem = f"it hangs: {WAITING:,} events wait for it"

    def finish(self) -> None:
        """Let the logger end after the events that wait for it."""
        self.events.put(None)

    def wait(self, seconds: float) -> None:
        self.thread.join(seconds)
        if self.thread.is_alive() and self.problem is None:
            self.problem = f"it did not finish within {CLOSE_SECONDS:.0f} seconds"


class Sinks:
    """The loggers of a run. Nothing here raises, and nothing but `close` waits."""

    def __init__(self, names: Iterable[str], folder: Path, run: dict[str, Any], step: int):
        self.folder = folder
        self.workers = [_Worker(name, folder, run, step) for name in names]
        self._reported: set[str] = set()

    def log(self, event: Event) -> None:
        for worker in self.workers:
            worker.log(event)

    def problems(self) -> list[str]:
        """Return one sentence for each logger that was switched off since the last call."""
        found = []
        for worker in self.workers:
            if worker.problem is not None and worker.name not in self._reported:
                self._reported.add(worker.name)
                again = f"glass train --replay {self.folder} --log-to {worker.name}"
                why = f"the logger {worker.name} is switched off ({worker.problem})"
                found.append(f"{why}; log.jsonl is complete, and `{again}` sends it again")
        return found

    def close(self) -> None:
        """Wait for the loggers to finish, together no longer than CLOSE_SECONDS."""
        until = time.monotonic() + CLOSE_SECONDS
        for worker in self.workers:
            worker.finish()
        for worker in self.workers:  # all of them finish at the same time
            worker.wait(max(0.1, until - time.monotonic()))


def replay(folder: Path, names: Iterable[str], run: dict[str, Any]) -> int:
    """Send the log of a run to loggers, as a new run there. Return the number of events."""
    names = list(names)
    check_names(names)
    events = list(read_log(folder / "log.jsonl"))
    for name in names:
        try:
            sink = make_sink(name, folder)
            sink.start(run, 0)
            for event in events:
                sink.log(event)
            sink.close()
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SinkError(f"the logger {name} failed ({reason}).") from None
    return len(events)


def read_log(file: Path) -> Iterator[Event]:
    """Yield the events of a log.jsonl. A last line that a crash cut off is skipped."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        raise SinkError(f"{file} cannot be read: give the folder of a run, such as runs/latest.") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = json.loads(line, parse_constant=float)
            assert isinstance(event, dict)
            assert isinstance(event["event"], str)
        except (ValueError, KeyError, AssertionError):
            if number >= len(lines) - 1:
                return
            raise SinkError(f"line {number} of {file} is not an event: restore the file.") from None
        yield event
