"""The events of a run: written to log.jsonl, optionally to TensorBoard, and passed to a listener; its throughput."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from glassformer.errors import install
from glassformer.files import write_atomically

Report = Callable[[dict[str, Any]], None]


class Log:
    """Writes events to log.jsonl and passes them on. A resumed run drops the lines of steps that will be repeated."""

    def __init__(
        self, path: Path, listen: Report | None, from_step: int, is_main: bool = True, tensorboard: bool = False
    ):
        self.listen, self.is_main = listen, is_main
        self.tensorboard: Any = None
        if not is_main:  # only one rank writes and reports
            return
        if tensorboard:
            self.tensorboard = _tensorboard(path.parent / "tensorboard")
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # a line cut off by a crash
                    if json.loads(line).get("step", 0) <= from_step:
                        kept.append(line + "\n")
        write_atomically(path, "".join(kept).encode())
        self.file = path.open("a", encoding="utf-8")

    def __call__(self, **event: Any) -> None:
        if not self.is_main:
            return
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()
        if self.tensorboard is not None and event["event"] in ("step", "validation"):
            for name, value in event.items():
                if isinstance(value, float):
                    self.tensorboard.add_scalar(f"{event['event']}/{name}", value, event["step"])
        if self.listen is not None:
            self.listen(event)

    def close(self) -> None:
        if self.is_main:
            self.file.close()
        if self.tensorboard is not None:
            self.tensorboard.close()


class Throughput:
    """Steps per second of a run, and its ETA."""

    def __init__(self, step: int, steps: int, before: float = 0.0):
        """`step` of `steps` were done in an earlier process, in `before` seconds."""
        self.step, self.steps, self.since, self.excluded = step, steps, time.perf_counter(), 0.0
        self.began = self.since - before
        self.first: tuple[int, float] | None = None

    def seconds(self) -> float:
        """Return the seconds that the run has taken, earlier processes included."""
        return time.perf_counter() - self.began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent here from steps/s. It is included in the ETA."""
        began = time.perf_counter()
        yield
        self.excluded += time.perf_counter() - began

    def read(self, step: int) -> dict[str, float]:
        """Return steps/s since the last reading, and the ETA in seconds.

        The ETA uses the mean time of a step after the first reading, so that the start-up is not part of it.
        """
        now = time.perf_counter()
        rate = (step - self.step) / max(now - self.since - self.excluded, 1e-9)
        self.step, self.since, self.excluded = step, now, 0.0
        if self.first is None:
            self.first = step, now
            return {"steps_per_second": rate}
        mean = (now - self.first[1]) / (step - self.first[0])
        return {"steps_per_second": rate, "seconds_left": mean * (self.steps - step)}


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            f"loop.tensorboard=true needs tensorboard: {install('logs')}, or leave it out (see log.jsonl)."
        ) from None
    return SummaryWriter(str(folder))
