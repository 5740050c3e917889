"""Ranks that are killed, stopped, or asked to stop: what is printed, and that the run goes on as if undisturbed."""

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from glassformer.training import checkpoint
from glassformer.training.distributed import failure
from glassformer.training.distributed.failure import Watch, explain
from tests.cli.asking import settings
from tests.training.distributed.ranks import BOUND, ROOT, SHORT, TORCHRUN, alone, curve, environment, where
from tests.training.tiny import corpus

LONG = (*SHORT, "loop.steps=40")


def run_ranks(
    folder: Path, name: str, act: Callable[[subprocess.Popen, dict], None], *changes: str, ranks: int = 2, restarts=0
) -> tuple[int, str]:
    """Train under torchrun with `--resume auto`; `act` gets each event. Return the exit code and what was printed."""
    words = [*TORCHRUN, str(ranks), "--max-restarts", str(restarts), "-m", "glassformer", "train", "--no-latest"]
    words += ["--json", "--resume", "auto", *settings(*LONG, *where(folder, name), *changes)]
    with (
        (folder / f"{name}.err").open("w+") as errors,
        subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as agent,
    ):
        assert agent.stdout is not None
        for line in agent.stdout:
            act(agent, json.loads(line))
        code = agent.wait(timeout=90)
        errors.seek(0)
        return code, errors.read()


def children(agent: subprocess.Popen) -> list[int]:
    """Return the process ids of the ranks, in order."""
    return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]


def once(step: int, work: Callable[[subprocess.Popen], None]) -> Callable[[subprocess.Popen, dict], None]:
    """Return an action that does `work` at the first event of a training step."""
    done = []

    def act(agent: subprocess.Popen, event: dict) -> None:
        if event.get("event") == "step" and event["step"] == step and not done:
            done.append(step)
            work(agent)

    return act


def nothing(agent: subprocess.Popen, event: dict) -> None:
    """Let it run."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_run_that_is_stopped_and_loses_a_rank_goes_on(tmp_path, kind):
    corpus(tmp_path)
    parallel = f"machine.parallel={kind}"
    began = []

    def ask(agent: subprocess.Popen) -> None:
        began.append(time.monotonic())
        agent.send_signal(signal.SIGTERM)

    code, printed = run_ranks(tmp_path, "parted", once(13, ask), parallel)
    assert code != 0
    assert time.monotonic() - began[0] < 30
    held = checkpoint.steps(tmp_path / "parted")[-1]
    assert held.name not in ("step-00000010", "step-00000040")  # that of the step in which the signal came
    command = f"torchrun --nproc-per-node 2 -m glassformer train --resume {tmp_path / 'parted'}"
    assert printed.count(f"stopped; continue with: {command}\n") == 1
    assert "exitcode  : -15" not in printed

    code, printed = run_ranks(
        tmp_path, "parted", once(27, lambda agent: os.kill(children(agent)[1], signal.SIGKILL)), parallel, restarts=2
    )
    assert code == 0
    sentences = [line for line in printed.splitlines() if line.startswith("glass: ")]
    assert len(sentences) == 1
    words = r"glass: rank 1 on \S+ ended while rank 0 waited for it; the last checkpoint is step-0"
    assert re.match(words, sentences[0])
    assert sentences[0].endswith(f"torchrun restarts it (2 restarts left), or continue with: {command}")
    assert "Traceback" not in printed
    found, expected = curve(tmp_path / "parted"), alone(tmp_path, "alone", *LONG)
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in found) <= BOUND


@pytest.mark.slow
def test_fifty_kills_at_random_moments_change_nothing(tmp_path):
    """kill -9 of a random rank, also while it starts and writes: every checkpoint that is published stays whole."""
    corpus(tmp_path)
    changes = (
        "machine.parallel=fsdp",
        "model.dropout=0.1",
        "loop.steps=400",
        "loop.checkpoint_every=3",
        "loop.keep=200",
    )
    assert run_ranks(tmp_path, "whole", nothing, *changes, "loop.eval_every=20")[0] == 0
    draw, kills = random.Random(0), 0
    left = draw.randrange(12)  # events until the next kill; the first event of an attempt is `start`

    def kill(agent: subprocess.Popen, event: dict) -> None:
        nonlocal kills, left
        left -= 1
        if left < 0 and kills < 50 and len(found := children(agent)) == 2:
            left, rank = draw.randrange(12), draw.randrange(2)
            time.sleep(draw.random() / 5)  # steps, validations and checkpoints go on meanwhile
            try:
                os.kill(found[rank], signal.SIGKILL)
            except ProcessLookupError:  # the event was written before the last kill, which has just ended this rank
                return
            kills += 1
            print(f"kill {kills}: rank {rank} after {event['event']} {event.get('step')}", flush=True)

    code, printed = run_ranks(tmp_path, "parted", kill, *changes, "loop.eval_every=20", restarts=60)
    assert (code, kills) == (0, 50), printed[-3000:]
    for held in checkpoint.steps(tmp_path / "parted"):
        checkpoint.read(held)
    assert curve(tmp_path / "parted") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_within_the_timeout(tmp_path):
    corpus(tmp_path)
    stopped = []

    def stop(agent: subprocess.Popen) -> None:
        stopped.append(time.monotonic())
        os.kill(children(agent)[2], signal.SIGSTOP)

    changes = ("machine.timeout=3", "loop.steps=4000", "loop.log_every=5")
    code, printed = run_ranks(tmp_path, "run", once(15, stop), *changes, ranks=3)
    assert code != 0
    sentences = [line for line in printed.splitlines() if line.startswith("glass: ")]
    assert len(sentences) == 1, printed[-3000:]
    words = (
        r"glass: rank 2 on \S+ did not answer within machine.timeout=3 s while ranks 0 and 1 waited for it; the last "
    )
    assert re.match(words, sentences[0])
    assert "Traceback (most recent call last):\n  File" not in printed.split("ChildFailedError")[0].split("glass: ")[0]


class Store(dict):
    """A key-value store in this process."""

    def clone(self) -> "Store":
        return self

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


class Gone(Store):
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def watches(monkeypatch, world: int, store: Store | None = None) -> list[Watch]:
    monkeypatch.setattr(failure, "PERIOD", 0.02)
    monkeypatch.setattr(failure, "PAUSE", 0.2)
    store = Store() if store is None else store
    return [Watch(store, rank, world) for rank in range(world)]


def test_the_rank_whose_heart_stopped_is_named_by_the_first_of_the_others(monkeypatch, tmp_path):
    ranks = watches(monkeypatch, 3)
    ranks[0].stop()
    time.sleep(0.1)
    closed = RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer")
    assert failure.is_lost_connection(closed)
    assert not failure.is_lost_connection(RuntimeError("shapes differ"))
    first, second = (explain(closed, watch, str(tmp_path), 5) for watch in ranks[1:])
    assert (first.speaks, second.speaks) == (True, False)
    assert " ended while ranks 1 and 2 waited for it; there is no checkpoint yet: continue with: " in str(first)
    assert str(first).startswith("rank 0 on ")
    for watch in ranks:
        watch.stop()


def test_a_rank_that_lives_but_is_behind_is_named(monkeypatch, tmp_path):
    ranks = watches(monkeypatch, 3)
    for watch, count in zip(ranks, (7, 4, 7), strict=True):
        watch.exchanges = count
    late = RuntimeError("gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation")
    found = explain(late, ranks[2], str(tmp_path), 5)
    assert re.match(r"rank 1 on \S+ did not answer within machine.timeout=5 s while ranks 0 and 2 waited", str(found))
    assert not found.speaks
    for watch in ranks:
        watch.stop()


def test_without_a_store_rank_0_is_the_lost_one(monkeypatch, tmp_path):
    watch = watches(monkeypatch, 2, Gone())[1]
    found = explain(RuntimeError("gloo/transport: Connection reset"), watch, str(tmp_path), 5)
    assert str(found).startswith("rank 0 ended while rank 1 waited for it")
    assert found.speaks
    watch.stop()
