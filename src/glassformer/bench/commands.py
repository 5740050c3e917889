"""What the benchmarks for developers share: options, random batches, measurements in turns, and in fresh processes."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from glassformer.bench.race import rotated

if TYPE_CHECKING:
    from glassformer.training.objective import Batch

Name = TypeVar("Name", bound=Hashable)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose `--help` prints a module's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(contenders: Mapping[Name, Callable[[], float]], rounds: int, warm_up: int = 0) -> dict[Name, list[float]]:
    """Return what each contender measured in every round. Rounds of the warm-up are left out.

    Another contender begins each round, so that a slow phase of the machine affects all of them.
    """
    times: dict[Name, list[float]] = {name: [] for name in contenders}
    for number in range(-warm_up, rounds):
        for name in rotated(list(contenders), number):
            measured = contenders[name]()
            if number >= 0:
                times[name].append(measured)
    return times


def spread(rounds: Sequence[float]) -> float:
    """Return (largest - smallest) / median."""
    return (max(rounds) - min(rounds)) / statistics.median(rounds)


def in_process(module: str, *arguments: str, launcher: Sequence[str] = (), **environment: str) -> list[Any]:
    """Run a module in a fresh process with one thread, and return the JSON objects and lists that it prints."""
    command = [sys.executable, *launcher, "-m", module, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


def random_batch(rows: int, length: int, used: int, seed: int = 0, device: str = "cpu") -> "Batch":
    """Return sequences of random ids below `used`, and their next tokens as targets."""
    import torch

    from glassformer.training.objective import Batch

    ids = torch.randint(0, used, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).to(torch.device(device))
