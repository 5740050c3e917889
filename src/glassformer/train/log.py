"""What happened, as it happens: log.jsonl always, TensorBoard when asked for, and a listener."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "loop.tensorboard=true needs tensorboard: pip install 'glassformer[logs]', or leave it out (see log.jsonl)."
        ) from None
    return SummaryWriter(str(folder))
