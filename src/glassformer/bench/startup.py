"""Start-up: time of fresh processes from the command to the first token, and the time that cannot be avoided.

The model file is in the system's file cache, as at every start but the first. Its bytes are read once per round, to
measure what reading alone takes.

With `--training`, the time to the tenth training step, twice in each round: cold, with an empty folder for everything
that is compiled, and warm, with the folder that the cold start filled.
"""

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from glassformer.bench.peers.base import Order
from glassformer.bench.processes import Died, Worker, ending_workers, environment
from glassformer.bench.race import Say, recording_death, rotated
from glassformer.bench.result import Row

# name -> arguments of the interpreter: not contenders, but parts of their start-up time
PLAIN = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import glassformer": ["-c", "import glassformer"],
    "glass --help": ["-m", "glassformer", "--help"],
}
OF_TRAINING = {
    "import torch": ["-c", "import torch"],
    "import glassformer.training": ["-c", "import glassformer.training.loop, glassformer.training.session"],
}
READING = "reading the file"
COLD, WARM = "cold", "warm"


def plain_rows(training: bool = False) -> list[Row]:
    if training:
        return [Row(name, "", ours=False) for name in OF_TRAINING]
    known = importlib.util.find_spec("tyro") is not None  # the command line needs it, the library does not
    return [Row(name, "", ours=False) for name in (*PLAIN, READING) if known or name != "glass --help"]


def measure(orders: Sequence[tuple[Order, Row]], plain: Sequence[Row], model: Path, rounds: int, say: Say) -> None:
    """Measure seconds into the rows, one process at a time. A first round, not counted, fills the file cache."""
    by_name = {row.name: order for order, row in orders}
    rows = [*(row for _, row in orders), *plain]
    for number in range(-1, rounds):
        say("a round to warm the file cache" if number < 0 else f"round {number + 1} of {rounds}")
        for row in rotated(rows, max(number, 0)):
            if row.died:
                continue
            with recording_death(row, say):
                seconds = _contender(by_name[row.name], row) if row.name in by_name else _plain(row.name, model)
                if number >= 0:
                    row.rounds.append(seconds)


def measure_training(
    orders: Sequence[tuple[Order, dict[str, Row]]], plain: Sequence[Row], rounds: int, say: Say
) -> None:
    """Measure seconds into the rows of each contender: one for a cold start, one for a warm one after it."""
    by_name = {order.name: (order, rows) for order, rows in orders}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for name in rotated([*by_name, *(row.name for row in plain)], number):
            if name not in by_name:
                row = next(row for row in plain if row.name == name)
                _record(row, lambda row=row: _process(OF_TRAINING[row.name]), say)  # type: ignore[misc]
                continue
            order, rows = by_name[name]
            with tempfile.TemporaryDirectory(prefix="caches-") as caches:
                for kind in (COLD, WARM):
                    say(f"{name} {rows[kind].precision}, {kind}")
                    _record(rows[kind], lambda: _contender(order, rows[kind], Path(caches)), say)  # noqa: B023


def _record(row: Row, seconds: Callable[[], float], say: Say) -> None:
    if not row.died:
        with recording_death(row, say):
            row.rounds.append(seconds())


def _contender(order: Order, row: Row, caches: Path | None = None) -> float:
    with ending_workers() as workers:
        workers.append(Worker(order, caches))
        ready = workers[0].load()
        seconds = time.perf_counter() - workers[0].began
    row.version, row.ids = ready["version"], ready["ids"]
    return seconds


def _plain(name: str, model: Path) -> float:
    if name != READING:
        return _process(PLAIN[name])
    began = time.perf_counter()
    for file in sorted(model.glob("*.safetensors")):
        file.read_bytes()
    return time.perf_counter() - began


def _process(arguments: Sequence[str]) -> float:
    """Return the seconds of an interpreter with these arguments."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], capture_output=True, env=environment(1), check=False)
    if done.returncode:
        raise Died((done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1])
    return time.perf_counter() - began
