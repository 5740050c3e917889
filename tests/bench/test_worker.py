"""Inside a contender's process: what is timed, and that the answers have a channel of their own."""

import dataclasses
import json
import subprocess
import sys
import time
import types

import pytest

from glassformer.bench import training, worker
from glassformer.bench.peers.base import Order
from tests.bench import tiny


class Slow:
    """A peer whose first token takes 20 ms and every other 5 ms."""

    version = "7"

    def __init__(self, order):
        self.calls = []

    def generate(self, prompts, new, mark, sampled=False, beams=0):
        self.calls.append(-new if sampled else new)
        for step in range(new):
            time.sleep(0.005 if step else 0.02)
            mark()
        return [[beams] * new for _ in prompts]


@pytest.fixture
def slow(monkeypatch):
    module = types.ModuleType("glassformer.bench.peers.slow")
    module.Peer = Slow
    monkeypatch.setitem(sys.modules, module.__name__, module)


def order(task, new=5):
    return Order("slow", "slow", task, "float32", "", 1, ((1, 2, 3), (4, 5, 6)), new)


@pytest.mark.usefixtures("slow")
def test_decoding_is_timed_from_the_first_token_on():
    served = worker.Generating(order("decode"))
    assert served.peer.calls == [5] * worker.WARM_UP
    answer = served.turn(0)
    assert answer["units"] == 4 * 2
    assert answer["seconds"] >= 0.02
    assert answer["first"] >= 0.02
    assert answer["ids"] == [[0] * 5] * 2


@pytest.mark.usefixtures("slow")
def test_on_a_gpu_the_first_token_and_the_end_are_waited_for(monkeypatch):
    """A mark may come before the GPU has computed the token, but ids in Python have reached the host."""
    waits = []
    monkeypatch.setattr(worker, "wait", lambda device: waits.append(device) or time.sleep(0.01))
    served = worker.Generating(dataclasses.replace(order("decode"), device="cuda"))
    slow = served.peer.generate

    def late(prompts, new, mark):
        ids = slow(prompts, new, mark)
        time.sleep(0.05)
        return ids

    served.peer.generate = late
    answer = served.turn(0)
    assert waits == ["cuda", "cuda"]  # before the start, and at the first token
    assert answer["units"] == 4 * 2
    assert answer["seconds"] >= 0.02 + 0.05
    assert answer["first"] >= 0.02 + 0.01


@pytest.mark.usefixtures("slow")
def test_sampled_tokens_are_timed_and_the_most_likely_ones_compared():
    served = worker.Generating(dataclasses.replace(order("decode"), setting={"sampled": True}))
    assert served.facts()["ids"] == [[0] * 5] * 2
    assert "ids" not in served.turn(0)
    assert served.peer.calls == [5] + [-5] * (worker.WARM_UP + 1)
    reference = worker.Generating(dataclasses.replace(order("reference"), setting={"sampled": True}))
    assert reference.turn(0)["ids"] == [[0] * 5] * 2
    assert reference.peer.calls == [5]


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("task", ["decode", "reference"])
def test_beam_search_is_timed_as_a_whole(task):
    answer = worker.Generating(dataclasses.replace(order(task), setting={"beams": 3})).turn(0)
    assert (answer["units"], answer["ids"]) == (5 * 2, [[3] * 5] * 2)
    assert answer["seconds"] >= 0.02 + 4 * 0.005
    assert "first" not in answer


@pytest.mark.usefixtures("slow")
def test_prefill_is_timed_as_a_whole_and_counts_the_prompt():
    answer = worker.Generating(order("prefill", new=1)).turn(0)
    assert answer["units"] == 6
    assert answer["seconds"] >= 0.02


@pytest.mark.usefixtures("slow")
def test_a_cold_start_warms_nothing():
    served = worker.Generating(order("startup", new=1))
    assert served.peer.calls == [1]
    assert served.facts() == {"version": "7", "ids": [[0], [0]]}


def test_training_goes_through_the_batches_in_order(monkeypatch):
    seen = []
    trainer = types.SimpleNamespace(version="7", step=lambda a, b: seen.append(a) or float(a))
    monkeypatch.setattr(training, "trainer", lambda order: trainer)
    monkeypatch.setattr(training, "batch", lambda order, step: (step, step))
    monkeypatch.setattr(training, "tokens_per_step", lambda order: 7)
    served = worker.Training(order("train", new=3))
    assert served.facts()["ids"] == [[0.0, 1.0]]
    assert served.turn(0)["ids"] == [[2.0, 3.0, 4.0]]
    assert served.turn(1)["units"] == 3 * 7
    assert seen == list(range(8))


def test_training_on_a_gpu_waits_at_the_ends_of_a_turn_only(monkeypatch):
    """Six steps come first, because ours captures a graph; losses are read when all steps of a turn are done."""
    events = []

    class Loss:
        def __float__(self):
            events.append("read")
            return 1.0

    trainer = types.SimpleNamespace(version="7", step=lambda a, b: events.append("step") or Loss())
    monkeypatch.setattr(training, "trainer", lambda order: trainer)
    monkeypatch.setattr(training, "batch", lambda order, step: (step, step))
    monkeypatch.setattr(training, "tokens_per_step", lambda order: 1)
    monkeypatch.setattr(worker, "wait", lambda device: events.append("wait"))
    served = worker.Training(dataclasses.replace(order("train", new=2), device="cuda"))
    assert events == ["wait", *["step"] * 6, "wait", *["read"] * 6]
    events.clear()
    served.turn(0)
    assert events == ["wait", "step", "step", "wait", "read", "read"]


def test_the_first_steps_of_others_are_their_trainers(monkeypatch):
    trainer = types.SimpleNamespace(version="7", step=lambda a, b: float(a))
    monkeypatch.setattr(training, "trainer", lambda order: trainer)
    monkeypatch.setattr(training, "batch", lambda order, step: (step, step))
    monkeypatch.setattr(training, "first_steps_of_a_run", lambda order: ("ours", [5.0]))
    assert worker.FirstSteps(order("first-steps", new=3)).facts() == {"version": "7", "ids": [[0.0, 1.0, 2.0]]}
    given = dataclasses.replace(order("first-steps"), name="glassformer")
    assert worker.FirstSteps(given).facts() == {"version": "ours", "ids": [[5.0]]}


def test_reading_gives_bytes_and_seconds():
    served = worker.Reading(Order("memory", "bandwidth", "bandwidth", "float32", "", setting={"size": 1 << 20}))
    answer = served.turn(0)
    assert answer["units"] == 1 << 20
    assert answer["seconds"] > 0


def test_the_fastest_of_several_readings_counts(monkeypatch):
    served = worker.Reading(Order("memory", "bandwidth", "bandwidth", "float32", "", setting={"size": 1 << 16}))
    marks = iter([0.0, 9.0, 10.0, 10.5, 20.0, 27.0, 30.0, 33.0, 40.0, 41.0])
    monkeypatch.setattr(worker.time, "perf_counter", lambda: next(marks))
    assert served.turn(0)["seconds"] == 0.5


def test_starting_a_process_imports_nothing_of_weight():
    code = "import glassformer.bench.worker, sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "numpy", "tyro", "rich"}


def test_the_process_answers_in_json_whatever_is_printed(subject, tmp_path):
    from tests.bench import checkout

    given = tiny.order(subject, "nanogpt", "nanogpt", checkout=str(checkout.nanogpt(tmp_path)), new=3)
    lines = f"{given.to_json()}\n" + '{"turn": 0}\n'
    run = [sys.executable, "-m", "glassformer.bench.worker"]
    done = subprocess.run(run, input=lines, capture_output=True, text=True, check=True)
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert ready["ready"]["version"] == "checkout"
    assert answer["ids"] == tiny.engine_ids(subject, given)
    assert "number of parameters" in done.stderr
