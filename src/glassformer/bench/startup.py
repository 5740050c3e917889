"""Cold start: time of fresh processes from the command to the first token, and the time that cannot be avoided.

The model file is in the system's file cache, as at every start but the first. Its bytes are read once per round, to
measure what reading alone takes.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from glassformer.bench.peers.base import Order
from glassformer.bench.processes import Died, Worker, ending_workers, environment
from glassformer.bench.race import Say, rotated
from glassformer.bench.result import Row

# name -> arguments of the interpreter: not contenders, but parts of their start-up time
PLAIN = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import glassformer": ["-c", "import glassformer"],
    "glass --help": ["-m", "glassformer", "--help"],
}
READING = "reading the file"


def plain_rows() -> list[Row]:
    return [Row(name, "", ours=False) for name in (*PLAIN, READING)]


def measure(orders: Sequence[tuple[Order, Row]], plain: Sequence[Row], model: Path, rounds: int, say: Say) -> None:
    """Measure seconds into the rows, one process at a time. A first round, not counted, fills the file cache."""
    by_name = {row.name: order for order, row in orders}
    rows = [*(row for _, row in orders), *plain]
    for number in range(-1, rounds):
        say("a round to warm the file cache" if number < 0 else f"round {number + 1} of {rounds}")
        for row in rotated(rows, max(number, 0)):
            if row.died:
                continue
            try:
                seconds = _contender(by_name[row.name], row) if row.name in by_name else _plain(row.name, model)
            except Died as death:
                row.died = str(death)
                say(f"{row.name} died: {death}")
                continue
            if number >= 0:
                row.rounds.append(seconds)


def _contender(order: Order, row: Row) -> float:
    with ending_workers() as workers:
        workers.append(Worker(order))
        ready = workers[0].load()
        seconds = time.perf_counter() - workers[0].began
    row.version, row.ids = ready["version"], ready["ids"]
    return seconds


def _plain(name: str, model: Path) -> float:
    began = time.perf_counter()
    if name == READING:
        for file in sorted(model.glob("*.safetensors")):
            file.read_bytes()
    else:
        done = subprocess.run([sys.executable, *PLAIN[name]], capture_output=True, env=environment(1), check=False)
        if done.returncode:
            raise Died((done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1])
    return time.perf_counter() - began
