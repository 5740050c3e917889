"""Run contenders in turns: all are loaded and stopped first, then measured in rounds, in rotating order."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from glassformer.bench.peers.base import Order
from glassformer.bench.processes import Died, Worker, ask_once, ending_workers
from glassformer.bench.result import Row

Say = Callable[[str], None]


Item = TypeVar("Item")


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """Return the order of a round: another contender begins each round, so that no contender is always first."""
    at = turn % len(items) if items else 0
    return [*items[at:], *items[:at]]


def race(orders: Sequence[tuple[Order, Row]], rounds: int, say: Say) -> None:
    """Measure, and fill in the rows. A contender that dies is recorded with its last line; the others continue."""
    with ending_workers() as workers:
        running: dict[str, Worker] = {}
        for order, row in orders:
            say(f"loading {row.name} {row.precision}")
            with recording_death(row, say):
                workers.append(Worker(order))
                ready = workers[-1].load()
                workers[-1].signal(signal.SIGSTOP)
                row.load, row.version, row.ids = ready["seconds"], ready["version"], ready.get("ids") or []
                running[row.name] = workers[-1]
        rows = [row for _, row in orders]
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for row in rotated(rows, number):
                if row.name in running and not row.died:
                    with recording_death(row, say):
                        _turn(running[row.name], row, number)


@contextlib.contextmanager
def recording_death(row: Row, say: Say) -> Iterator[None]:
    """If the contender of a row dies here, record and report its last line of output."""
    try:
        yield
    except Died as death:
        row.died = str(death)
        say(f"{row.name} died: {death}")


def _turn(worker: Worker, row: Row, number: int) -> None:
    answer = worker.turn(number)
    row.rounds.append(answer["units"] / answer["seconds"])
    if "first" in answer:
        row.first.append(answer["first"])
    if worker.order.task == "train":
        row.ids = [row.ids[0] + answer["ids"][0]]  # one long list of losses
    elif "ids" in answer:
        if row.ids and row.ids != answer["ids"]:
            row.agrees = "its ids differ from round to round"
        row.ids = answer["ids"]


def prepare(orders: Sequence[tuple[Order, Row]], say: Say) -> list[tuple[Order, Row]]:
    """Run the conversions, each in its own process; return those that succeeded, record failures in the rows."""
    made = []
    for order, row in orders:
        say(f"converting for {row.name} {row.precision}")
        try:
            ask_once(order)
            made.append((order, row))
        except Died as death:
            row.died = f"its converter failed: {death}"
            say(f"{row.name} cannot take part: {row.died}")
    return made
