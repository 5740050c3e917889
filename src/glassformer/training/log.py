"""What happened, as it happens: log.jsonl always, TensorBoard when asked for, and a listener; and how fast."""

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
    """log.jsonl and whoever listens. A resumed run drops the lines of steps that will be done again."""

    def __init__(
        self, path: Path, listen: Report | None, from_step: int, is_main: bool = True, tensorboard: bool = False
    ):
        self.listen, self.is_main = listen, is_main
        self.board: Any = None
        if not is_main:  # one rank writes and tells
            return
        if tensorboard:
            self.board = _tensorboard(path.parent / "tensorboard")
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # a line torn by a crash
                    if json.loads(line).get("step", 0) <= from_step:
                        kept.append(line + "\n")
        write_atomically(path, "".join(kept).encode())
        self.file = path.open("a", encoding="utf-8")

    def __call__(self, **event: Any) -> None:
        if not self.is_main:
            return
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()
        if self.board is not None and event["event"] in ("step", "validation"):
            for name, value in event.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{event['event']}/{name}", value, event["step"])
        if self.listen is not None:
            self.listen(event)

    def close(self) -> None:
        if self.is_main:
            self.file.close()
        if self.board is not None:
            self.board.close()


class Pace:
    """How fast a run goes, and how long it will take."""

    def __init__(self, step: int, steps: int, before: float = 0.0):
        """`step`: how many of the `steps` were done before, in so many seconds."""
        self.step, self.steps, self.since, self.aside = step, steps, time.perf_counter(), 0.0
        self.began = self.since - before
        self.first: tuple[int, float] | None = None

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is done here is no step: it counts for the time left, not for the rate."""
        began = time.perf_counter()
        yield
        self.aside += time.perf_counter() - began

    def read(self, step: int) -> dict[str, float]:
        """Steps per second since the last reading; seconds left at the mean since the first, which saw a start-up."""
        now = time.perf_counter()
        rate = (step - self.step) / max(now - self.since - self.aside, 1e-9)
        self.step, self.since, self.aside = step, now, 0.0
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
