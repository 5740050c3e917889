"""Training runs: separate processes in the studio's folder, which survive the server and can be resumed.

    FOLDER/corpora/NAME.txt        uploaded texts
    FOLDER/runs/ID/spec.toml       the run file
                   studio.json     the wanted state (running, paused, stopped), the process id, the predicted memory
                                   and the peak memory
                   events.jsonl    all events, appended; the id of an event is the offset of its end
                   errors.txt      standard error of the process
                   lock            held by the process while it runs
                   out/            the output folder: checkpoints, best, last, log.jsonl

The process is `glass train spec.toml --no-latest --json`, after a restart `glass train --resume out ...`. It inherits
the lock, so it runs as long as the lock is held; a process id alone could have been reused. To pause, the process gets
SIGTERM and writes a checkpoint after the current step. At start-up the studio resumes runs whose wanted state is
running and whose process has ended.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.files import write_atomically
from glassformer.studio.errors import BusyError, ConflictError, NotFoundError, StudioError
from glassformer.studio.settings import Limits

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
WATCH_SECONDS = 0.5
"""Interval at which the memory of a running process is read."""
MAX_RESTARTS = 3
"""A run that failed this often is not restarted again."""


@dataclass(frozen=True)
class Run:
    """The folder of one run."""

    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def events(self) -> Path:
        return self.folder / "events.jsonl"

    @property
    def best(self) -> Path:
        return self.folder / "out" / "best"

    def meta(self) -> dict[str, Any]:
        """Read studio.json; an empty dict if it cannot be read."""
        try:
            meta = json.loads((self.folder / "studio.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return meta if isinstance(meta, dict) else {}

    def update(self, **changes: Any) -> dict[str, Any]:
        """Change entries of studio.json."""
        meta = {**self.meta(), **changes}
        write_atomically(self.folder / "studio.json", json.dumps(meta, indent=1).encode())
        return meta

    def alive(self) -> bool:
        """Return whether the process of the run holds the lock."""
        import fcntl

        try:
            handle = os.open(self.folder / "lock", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def last_events(self, size: int = 1 << 16) -> list[dict[str, Any]]:
        """Return the complete events in the last `size` bytes of events.jsonl."""
        try:
            with self.events.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - size))
                lines = file.read().split(b"\n")[1 if end > size else 0 :]
        except OSError:
            return []
        return [event for line in lines if (event := parse(line)) is not None]

    def error(self) -> str:
        """Return the last error message of `glass` on the standard error of the process; empty if there is none."""
        with contextlib.suppress(OSError):
            lines = (self.folder / "errors.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            messages = [line for line in lines if line.startswith("glass: ")]
            if messages:
                return messages[-1].removeprefix("glass: ")
        return ""

    def memory(self) -> dict[str, int] | None:
        """Return the current and the peak memory of the process in bytes; None if the system does not report it."""
        try:
            text = Path(f"/proc/{int(self.meta()['pid'])}/status").read_text(encoding="utf-8")
            found = dict(re.findall(r"^Vm(RSS|HWM):\s+(\d+) kB", text, re.MULTILINE))
            return {"rss": 1024 * int(found["RSS"]), "peak": 1024 * int(found["HWM"])}
        except (OSError, KeyError, ValueError, TypeError):
            return None


def parse(line: bytes) -> dict[str, Any] | None:
    """Parse one line of events.jsonl; None for a line that a crash left incomplete."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _title(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["title"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class TrainingRuns:
    """All training runs and corpora of one studio."""

    def __init__(self, folder: Path, limits: Limits):
        self.folder, self.limits = folder, limits
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()

    def runs(self) -> list[Run]:
        """Return all runs, newest first."""
        try:
            found = [Run(p) for p in (self.folder / "runs").iterdir() if NAME.fullmatch(p.name) and p.is_dir()]
        except OSError:
            return []
        return sorted(found, key=lambda run: run.meta().get("created", 0), reverse=True)

    def run(self, id: str) -> Run:
        run = Run(self.folder / "runs" / id) if NAME.fullmatch(id) else None
        if run is None or not (run.folder / "studio.json").is_file():
            raise NotFoundError(f"there is no training run {id[:80]!r} here.")
        return run

    def corpora(self) -> list[dict[str, Any]]:
        """Describe the uploaded texts, sorted by name."""
        out = []
        with contextlib.suppress(OSError):
            for path in sorted((self.folder / "corpora").glob("*.txt")):
                if NAME.fullmatch(path.stem):
                    title = _title(path.with_suffix(".json")) or path.stem
                    out.append({"name": path.stem, "title": title, "bytes": path.stat().st_size})
        return out

    def corpus(self, name: str) -> Path | None:
        """Return the file of an uploaded corpus; None if there is none with this name."""
        path = self.folder / "corpora" / f"{name}.txt"
        return path if NAME.fullmatch(name) and path.is_file() else None

    def add_corpus(self, data: bytes, title: str = "") -> dict[str, Any]:
        """Store a text. Raises StudioError if it is not text. The title is only displayed, never used as a path."""
        if len(self.corpora()) >= self.limits.corpora:
            raise StudioError(
                f"{self.limits.corpora} texts are stored already: delete some in the folder corpora of the studio."
            )
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise StudioError(f"the file is not UTF-8 text (byte {error.start}): convert it first.") from None
        if "\0" in text:
            raise StudioError("the file is not text: it contains a NUL character, as binary files do.")
        if len(text) < 1000:
            raise StudioError(f"a text of {len(text)} characters is too short for training: give at least 1,000.")
        name = f"text-{secrets.token_hex(4)}"
        (self.folder / "corpora").mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "corpora" / f"{name}.txt", data)
        title = "".join(ch for ch in title if ch.isprintable())[:80] or name
        write_atomically(self.folder / "corpora" / f"{name}.json", json.dumps({"title": title}).encode())
        return {"corpus": name, "title": title, "characters": len(text), "bytes": len(data)}

    def state(self, run: Run) -> str:
        """Return running, pausing, paused, stopping, stopped, finished or failed."""
        wanted, alive = run.meta().get("wanted", "stopped"), run.alive()
        child = self._children.get(run.id)
        if child is not None:
            child.poll()  # reap a child process that has ended
        if alive:
            return {"running": "running", "paused": "pausing"}.get(wanted, "stopping")
        if any(event["event"] == "end" for event in run.last_events()):
            return "finished"
        return str(wanted) if wanted in ("paused", "stopped") else "failed"

    def describe(self, run: Run) -> dict[str, Any]:
        meta, state = run.meta(), self.state(run)
        known = ("created", "name", "corpus", "preset", "fields", "steps", "predicted_bytes", "parameters")
        events = run.last_events()
        last: dict[str, Any] = next((e for e in reversed(events) if "step" in e), {})
        best = [e["loss"] for e in events if e["event"] == "validation" and isinstance(e.get("loss"), float)]
        out = {"run": run.id, "state": state, "step": last.get("step", 0), **{key: meta.get(key) for key in known}}
        out |= {"predicted": meta.get("predicted_bytes"), "peak": meta.get("peak_bytes")}
        out["best"] = min(best, default=None)
        if state == "failed":
            out["error"] = (
                run.error() or "the process ended without an error message: resume the run, or see its errors.txt."
            )
        return {**out, "model": run.id if (run.best / "model.safetensors").exists() else None}

    def models(self) -> dict[str, Path]:
        """Return the folders of the best models, by run id."""
        found = {}
        with contextlib.suppress(OSError):
            for path in (self.folder / "runs").iterdir():
                if NAME.fullmatch(path.name) and (path / "out" / "best" / "model.safetensors").exists():
                    found[path.name] = path / "out" / "best"
        return found

    def start(self, spec: str, facts: dict[str, Any]) -> Run:
        """Start a new run from the TOML text of its run file."""
        with self._lock:
            self._check_capacity()
            if len(self.runs()) >= self.limits.kept_runs:
                raise StudioError(f"{self.limits.kept_runs} runs are stored already: delete some of their folders.")
            id = f"run-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            run = Run(self.folder / "runs" / id)
            run.folder.mkdir(parents=True)
            write_atomically(run.folder / "spec.toml", spec.encode())
            run.update(created=time.time(), wanted="running", restarts=0, **facts)
            self._spawn(run)
            return run

    def resume(self, run: Run) -> None:
        with self._lock:
            state = self.state(run)
            if state not in ("paused", "stopped", "failed"):
                raise ConflictError(f"{run.id} is {state}: only a paused, stopped or failed run can be resumed.")
            self._check_capacity()
            run.update(wanted="running", restarts=0)
            self._spawn(run)

    def end(self, run: Run, wanted: str) -> None:
        """Pause or stop: training writes a checkpoint after the current step, then its process ends."""
        with self._lock:
            state = self.state(run)
            if state == "paused" and wanted == "stopped":
                run.update(wanted=wanted)
                return
            if state not in ("running", "pausing"):
                raise ConflictError(f"{run.id} is {state}: only a running run can be {wanted}.")
            run.update(wanted=wanted)
            self._signal(run)

    def recover(self) -> list[str]:
        """Resume runs whose wanted state is running and whose process has ended. Returns their ids."""
        resumed = []
        with self._lock:
            for run in reversed(self.runs()):
                meta = run.meta()
                if run.alive():  # it survived the previous server
                    self._watch(run)
                if meta.get("wanted") != "running" or self.state(run) != "failed" or run.error():
                    continue
                if meta.get("restarts", 0) >= MAX_RESTARTS or self._busy() >= self.limits.runs:
                    continue
                run.update(restarts=meta.get("restarts", 0) + 1)
                self._spawn(run)
                resumed.append(run.id)
        return resumed

    def close(self) -> None:
        """Shut down: running jobs write a checkpoint and are resumed at the next start."""
        with self._lock:
            for run in self.runs():
                if run.alive():
                    self._signal(run)
            for child in self._children.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(10)
        self._closed.set()

    def _busy(self) -> int:
        return sum(run.alive() for run in self.runs())

    def _check_capacity(self) -> None:
        if self._busy() >= self.limits.runs:
            raise BusyError(f"{self.limits.runs} training run is active already: pause or stop it first.")

    def _signal(self, run: Run) -> None:
        with contextlib.suppress(ProcessLookupError, KeyError, TypeError, PermissionError):
            os.kill(int(run.meta()["pid"]), signal.SIGTERM)

    def _spawn(self, run: Run) -> None:
        import fcntl

        resumed = any((run.folder / "out" / "checkpoints").glob("step-*"))
        source = ["--resume", "out"] if resumed else ["spec.toml"]
        with run.events.open("ab") as events, (run.folder / "errors.txt").open("wb") as errors:
            if events.tell() and not run.events.read_bytes().endswith(b"\n"):
                events.write(b"\n")  # end a line that a crash left incomplete
            events.flush()
            lock = os.open(run.folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                child = subprocess.Popen(
                    [sys.executable, "-m", "glassformer", "train", *source, "--no-latest", "--json"],
                    cwd=run.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=events,
                    stderr=errors,
                    pass_fds=(lock,),
                    start_new_session=True,
                )
            except BlockingIOError:
                raise ConflictError(f"{run.id} is still ending: try again in a moment.") from None
            finally:
                os.close(lock)  # the child process has inherited it
        self._children[run.id] = child
        run.update(pid=child.pid)
        self._watch(run)

    def _watch(self, run: Run) -> None:
        """Record the peak memory of the run's process, in a thread that ends with the process or with this server."""

        def watch() -> None:
            while run.alive():
                memory = run.memory()
                with self._lock:
                    if memory and memory["peak"] > run.meta().get("peak_bytes", 0) and run.folder.exists():
                        run.update(peak_bytes=memory["peak"])
                if self._closed.wait(WATCH_SECONDS):
                    return

        threading.Thread(target=watch, name=f"memory of {run.id}", daemon=True).start()
