"""The process of one contender: `python -m glassformer.bench.worker` reads an order and answers in JSON lines.

The first line of standard input is the Order. The process loads, warms up and answers {"ready": ...}. Every further
line is a turn, {"turn": n}, and the answer is what was measured. Output of libraries goes to standard error. The
process ends with its parent.
"""

import ctypes
import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from glassformer.bench.peers.base import Order, wait

WARM_UP = 2
"""Calls before anything is timed: the first one compiles."""
WARM_UP_TOKENS = 320
"""New tokens before whole calls are timed: a model of ours that is used for so long moves its weights to huge pages."""
WARM_UP_STEPS = {"cpu": 2, "cuda": 6}
"""Training steps before anything is timed. On a GPU ours takes three steps, then captures a CUDA graph."""


def main() -> int:
    """Serve turns until standard input ends."""
    _end_with_parent()
    out = _own_output()
    order = Order.from_json(sys.stdin.readline())
    began = time.perf_counter()
    if order.task == "prepare":
        importlib.import_module(f"glassformer.bench.peers.{order.module}").prepare(order)
        _say(out, {"ready": {"seconds": time.perf_counter() - began}})
        return 0
    serve = _SERVED[order.task](order)
    _say(out, {"ready": {"seconds": time.perf_counter() - began, **serve.facts()}})
    for line in sys.stdin:
        _say(out, serve.turn(int(json.loads(line)["turn"])))
    return 0


def clock_of(order: Order) -> Callable[[], float]:
    """Return the clock of a measurement: seconds, or the processor seconds of this process."""
    return time.process_time if order.setting.get("cpu_time") else time.perf_counter


class Generating:
    """Decoding and prefill: one continuation of the prompts per turn."""

    def __init__(self, order: Order):
        self.order, self.clock = order, clock_of(order)
        self.peer = importlib.import_module(f"glassformer.bench.peers.{order.module}").Peer(order)
        self.first = self.peer.generate(order.prompts, 1, _nothing) if order.task == "startup" else []
        self.beams = order.setting.get("beams", 1)
        self.how: dict[str, Any] = {"beams": self.beams} if self.beams > 1 else {}
        if order.setting.get("sampled") and order.task == "decode":
            # the most likely tokens are compared, those that are timed are random
            self.first = self.peer.generate(order.prompts, order.new, _nothing)
            self.how = {"sampled": True}
        warm_up = WARM_UP if order.task in ("decode", "prefill") else 0
        if self.beams > 1 and warm_up:
            warm_up = max(warm_up, math.ceil(WARM_UP_TOKENS / order.new))
        for _ in range(warm_up):
            self.peer.generate(order.prompts, order.new, _nothing, **self.how)

    def facts(self) -> dict[str, Any]:
        return {"version": self.peer.version, "ids": self.first}

    def turn(self, number: int) -> dict[str, Any]:
        marks: list[float] = []

        def mark() -> None:
            if not marks:  # a GPU may still be computing the first token
                wait(self.order.device)
            marks.append(self.clock())

        wait(self.order.device)
        start = self.clock()
        ids = self.peer.generate(self.order.prompts, self.order.new, mark, **self.how)
        end = self.clock()
        if self.order.task == "prefill":
            return {"ids": ids, "seconds": end - start, "units": sum(map(len, self.order.prompts))}
        if self.beams > 1:  # which tokens belong to the best beam is known at the end
            return {"ids": ids, "seconds": end - start, "units": self.order.new * len(ids)}
        # timed from the first token on: reading the prompt is another benchmark
        steps = (len(marks) - 1) * len(ids)
        # a mark on a GPU may be early: the ids that `generate` returns have reached the host
        last = marks[-1] if self.order.device == "cpu" else end
        measured = {"seconds": last - marks[0], "units": steps, "first": marks[0] - start}
        return measured if "sampled" in self.how else {"ids": ids, **measured}


class Encoding:
    """Hidden states of texts of unequal length; the means of the first components take the place of ids."""

    def __init__(self, order: Order):
        self.order, self.clock = order, clock_of(order)
        self.peer = importlib.import_module(f"glassformer.bench.peers.{order.module}").Encoder(order)
        for _ in range(WARM_UP + 1):  # ours captures its CUDA graph in the second call
            start = self.clock()
            self.peer.encode(order.prompts)
            seconds = self.clock() - start
        self.calls = max(1, math.ceil(SHORTEST_TURN / max(seconds, 1e-6)))

    def facts(self) -> dict[str, Any]:
        return {"version": self.peer.version}

    def turn(self, number: int) -> dict[str, Any]:
        start = self.clock()
        for _ in range(self.calls):
            states = self.peer.encode(self.order.prompts)
        seconds = self.clock() - start
        means = [[float(x) for x in text[:, :COMPONENTS].mean(0)] for text in states]
        return {"ids": means, "seconds": seconds, "units": self.calls * len(self.order.prompts)}


SHORTEST_TURN = 0.1
"""Seconds of a turn at least: a GPU encodes some texts in a millisecond or two, and single calls differ by as much."""
COMPONENTS = 8
"""Components of the hidden states that are compared."""
READINGS = 5
"""Reads of memory in one turn. The fastest counts, because other work only slows reads down."""


class Reading:
    """Memory bandwidth."""

    def __init__(self, order: Order):
        self.peer = importlib.import_module("glassformer.bench.peers.bandwidth").Peer(order, **order.setting)
        self.peer.read()

    def facts(self) -> dict[str, Any]:
        return {"version": ""}

    def turn(self, number: int) -> dict[str, Any]:
        times, units = [], 0
        for _ in range(READINGS):
            start = time.perf_counter()
            units = self.peer.read()
            times.append(time.perf_counter() - start)
        return {"seconds": min(times), "units": units}


class Training:
    """Training steps, on the same batches for all contenders; losses take the place of ids."""

    def __init__(self, order: Order):
        from glassformer.bench import training

        self.order, self.made = order, training
        self.trainer = training.trainer(order)
        self.done = 0
        self.losses, _ = self._steps(WARM_UP_STEPS[order.device])

    def _steps(self, count: int) -> tuple[list[float], float]:
        """Return the losses and the seconds. Losses are read after the last step: training does not wait for each."""
        batches = [self.made.batch(self.order, self.done + i) for i in range(count)]
        self.done += count
        wait(self.order.device)
        start = time.perf_counter()
        losses = [self.trainer.step(*batch) for batch in batches]
        wait(self.order.device)
        seconds = time.perf_counter() - start
        return [float(loss) for loss in losses], seconds

    def facts(self) -> dict[str, Any]:
        return {"version": self.trainer.version, "ids": [self.losses]}

    def turn(self, number: int) -> dict[str, Any]:
        losses, seconds = self._steps(self.order.new)
        # nanoGPT's settings are published in steps, models in tokens
        units = self.made.tokens_per_step(self.order) * self.order.new
        return {"ids": [losses], "seconds": seconds, "units": units}


class FirstSteps:
    """The first training steps of a process. Ours are those of a whole run, which also reads its text."""

    def __init__(self, order: Order):
        from glassformer.bench import training

        if order.name == "glassformer":
            self.version, self.losses = training.first_steps_of_a_run(order)
            return
        trainer = training.trainer(order)
        self.version = trainer.version
        self.losses = [float(trainer.step(*training.batch(order, i))) for i in range(order.new)]

    def facts(self) -> dict[str, Any]:
        return {"version": self.version, "ids": [self.losses]}


_SERVED: dict[str, Any] = {
    **dict.fromkeys(("decode", "prefill", "startup", "reference"), Generating), "bandwidth": Reading, "train": Training,
    "encode": Encoding, "first-steps": FirstSteps,
}  # fmt: skip


def _nothing() -> None:
    pass


def _own_output() -> TextIO:
    """Return standard output for the answers alone; redirect what libraries print to standard error."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


def _end_with_parent() -> None:
    """Have Linux kill this process when its parent ends; a stopped process would otherwise remain."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
