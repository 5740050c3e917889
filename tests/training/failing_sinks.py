"""Loggers that fail, and one that remembers, as classes of a user."""

import threading
from pathlib import Path
from typing import Any

received: list[tuple[str, Any]] = []
"""What `Remembering` got."""
released = threading.Event()
"""Ends the waiting of `Hanging` and of `HangingAtTheEnd`."""


class Remembering:
    def __init__(self, folder: Path):
        received.append(("folder", folder))

    def start(self, run: dict[str, Any], step: int) -> None:
        received.append(("start", (run, step)))

    def log(self, event: dict[str, Any]) -> None:
        received.append(("log", event))

    def close(self) -> None:
        received.append(("close", None))


class RaisingInLog(Remembering):
    def log(self, event: dict[str, Any]) -> None:
        if event["event"] == "step":
            raise RuntimeError("no\nconnection")


class RaisingInStart(Remembering):
    def start(self, run: dict[str, Any], step: int) -> None:
        raise SystemExit(3)


class Hanging(Remembering):
    def log(self, event: dict[str, Any]) -> None:
        released.wait(60)


class HangingAtTheEnd(Remembering):
    def close(self) -> None:
        released.wait(60)
