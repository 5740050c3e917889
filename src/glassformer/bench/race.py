"""Contenders in turn: all loaded and stopped first, then round after round in an order that rotates."""

import signal
from collections.abc import Callable, Sequence

from glassformer.bench.peers.base import Order
from glassformer.bench.processes import Died, Worker, ask_once, crew
from glassformer.bench.result import Row

Say = Callable[[str], None]


def rotated(names: Sequence[Row], turn: int) -> list[Row]:
    """The order of a round: each round another one begins, so that everyone stands everywhere."""
    at = turn % len(names) if names else 0
    return [*names[at:], *names[:at]]


def race(orders: Sequence[tuple[Order, Row]], rounds: int, say: Say) -> None:
    """Fill in the rows. A contender that dies is noted with its last line; the others go on."""
    with crew() as workers:
        running: dict[str, Worker] = {}
        for order, row in orders:
            say(f"loading {row.name} {row.precision}")
            try:
                workers.append(Worker(order))
                ready = workers[-1].load()
            except Died as death:
                row.died = str(death)
                say(f"{row.name} died: {death}")
                continue
            workers[-1].signal(signal.SIGSTOP)
            row.load, row.version, row.ids = ready["seconds"], ready["version"], ready.get("ids") or []
            running[row.name] = workers[-1]
        rows = [row for _, row in orders]
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for row in rotated(rows, number):
                if row.name in running and not row.died:
                    _turn(running[row.name], row, number, say)


def _turn(worker: Worker, row: Row, number: int, say: Say) -> None:
    try:
        answer = worker.turn(number)
    except Died as death:
        row.died = str(death)
        say(f"{row.name} died: {death}")
        return
    row.rounds.append(answer["units"] / answer["seconds"])
    if "first" in answer:
        row.first.append(answer["first"])
    if worker.order.task == "train":
        row.ids = [row.ids[0] + answer["ids"][0]]  # one long list of losses
    elif "ids" in answer:
        if row.ids and row.ids != answer["ids"]:
            row.agrees = "its own rounds differ"
        row.ids = answer["ids"]


def prepare(orders: Sequence[tuple[Order, Row]], say: Say) -> list[tuple[Order, Row]]:
    """Conversions, each in a process of its own; those that could be made. The others are noted as dead."""
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
