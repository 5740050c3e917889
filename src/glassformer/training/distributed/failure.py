"""What is reported when a rank ends, hangs or falls behind: which one, who waited for it, and how to continue.

Every rank has a thread that writes a heartbeat into the key-value store of the run: a counter, the number of exchanges
that the rank has entered, and its host. When an exchange fails or takes longer than `machine.timeout`, the others read
the heartbeats twice. A rank whose counter stands still has ended or is stopped. If all counters go on, the rank that
entered the fewest exchanges is the one that the others waited for.
"""

import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glassformer.errors import listing
from glassformer.training.distributed.group import LostRankError, resume_command

PERIOD = 1.0
"""Seconds between two heartbeats."""
PAUSE = 3.0
"""Seconds between two readings of the heartbeats. torchrun ends the survivors 30 seconds after it asked them to."""


@dataclass(frozen=True)
class Heartbeat:
    """What one rank wrote last."""

    count: int
    exchanges: int
    host: str


class Watch:
    """The heartbeats of all ranks. `exchanges` is counted up by the group."""

    def __init__(self, store: Any, rank: int, world: int):
        self.store, self.rank, self.world = store.clone(), rank, world
        self.exchanges = 0
        self.count = 0
        self.stopped = threading.Event()
        self.beat()
        threading.Thread(target=self.run, daemon=True, name="heartbeat").start()

    def beat(self) -> None:
        self.count += 1
        self.store.set(f"heartbeat/{self.rank}", f"{self.count} {self.exchanges} {socket.gethostname()}")

    def run(self) -> None:
        try:
            while not self.stopped.wait(PERIOD):
                self.beat()
        except RuntimeError:
            pass  # the store ended, and with it the run

    def stop(self) -> None:
        self.stopped.set()

    def read(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank that has written one."""
        found = {}
        for rank in range(self.world):
            if self.store.check([key := f"heartbeat/{rank}"]):
                count, exchanges, host = self.store.get(key).decode().split(" ", 2)
                found[rank] = Heartbeat(int(count), int(exchanges), host)
        return found


def is_lost_connection(error: RuntimeError) -> bool:
    """Return whether an exchange failed because of another rank, and not the computation of this one."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo/transport" in str(error) or "NCCL" in str(error)


def explain(error: RuntimeError, watch: Watch, out: str, timeout: float) -> LostRankError:
    """Return the error that names the lost rank, who waited for it, and the command that continues the run."""
    late = "timed out" in str(error).lower()
    try:
        before = watch.read()
        time.sleep(PAUSE)
        after = watch.read()
    except RuntimeError:  # rank 0 holds the store unless torchrun does
        before, after = {}, {watch.rank: Heartbeat(1, watch.exchanges, socket.gethostname())}
        lost = [0]
    else:
        lost = [r for r in range(watch.world) if r not in after or before.get(r) == after[r]]
    alive = [rank for rank in sorted(after) if rank not in lost]
    why = f"did not answer within machine.timeout={timeout:g} s" if late else "ended"
    if not lost and alive:  # all of them live: one has not come to where the others wait
        fewest = min(after[rank].exchanges for rank in alive)
        lost = [rank for rank in alive if after[rank].exchanges == fewest]
        alive = [rank for rank in alive if rank not in lost] or alive
    names = listing([_name(rank, after) for rank in lost], "and")
    waiting = f"{'rank' if len(alive) == 1 else 'ranks'} {listing(alive, 'and')}"
    sentence = f"{names} {why} while {waiting} waited for {'it' if len(lost) == 1 else 'them'}"
    return LostRankError(f"{sentence}; {_how_to_continue(out)}", watch.rank == min(alive, default=watch.rank))


def _name(rank: int, known: dict[int, Heartbeat]) -> str:
    return f"rank {rank} on {known[rank].host}" if rank in known else f"rank {rank}"


def _how_to_continue(out: str) -> str:
    from glassformer.training.checkpoint import steps

    held = steps(Path(out)) if out else []
    last = f"the last checkpoint is {held[-1].name}" if held else "there is no checkpoint yet"
    most, done = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    left = most - done
    again = f"torchrun restarts it ({left} restarts left), or continue with: " if left > 0 else "continue with: "
    return f"{last}: {again}{resume_command(out)}"
