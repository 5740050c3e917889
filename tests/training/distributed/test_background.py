"""Checkpoints that a thread writes: the same files, later; errors reach the run."""

import os
import subprocess
import sys
import threading

import pytest

from glassformer.training import checkpoint, resume_session, train
from glassformer.training.checkpoint import CheckpointError
from glassformer.training.distributed.background import Background
from glassformer.training.distributed.group import ALONE
from tests.training import tiny
from tests.training.distributed.ranks import curve, job, together
from tests.training.tiny import corpus

FILES = ("model.safetensors", "optimizer.safetensors", "tokenizer.json")
ON = "checkpoint.background=true"


def test_the_same_files_are_written_behind_the_steps(tmp_path, monkeypatch):
    threads = set()
    write = checkpoint.write

    def watched(*given):
        threads.add(threading.current_thread().name)
        return write(*given)

    session = tiny.session(tmp_path, "loop.keep=9", "optim.ema=0.9", "checkpoint.first=true", name="at-once")
    train(session.run, session.data)
    monkeypatch.setattr(checkpoint, "write", watched)
    session = tiny.session(tmp_path, "loop.keep=9", "optim.ema=0.9", "checkpoint.first=true", ON, name="behind")
    train(session.run, session.data)
    assert threads == {"checkpoint"}
    for step in (0, 5, 10, 15, 20):
        a, b = (tmp_path / name / "checkpoints" / f"step-{step:08d}" for name in ("at-once", "behind"))
        assert all((a / name).read_bytes() == (b / name).read_bytes() for name in FILES)


def test_a_failed_write_stops_the_run_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    session = tiny.session(tmp_path, ON, "loop.checkpoint_every=5", "loop.eval_every=100", "loop.steps=60")
    write = checkpoint.write

    def full(run, step, *given):
        if step == 10:
            raise CheckpointError("the disk is full.")
        return write(run, step, *given)

    monkeypatch.setattr(checkpoint, "write", full)
    steps = []
    with pytest.raises(CheckpointError, match="the disk is full"):
        train(session.run, session.data, lambda event: steps.append(event.get("step")))
    assert max(step for step in steps if step is not None) <= 15
    monkeypatch.undo()
    assert checkpoint.read(tmp_path / "run")[1]["step"] == 5


def test_work_is_done_one_after_the_other_and_errors_are_raised_once():
    done: list[int] = []
    started = threading.Event()
    background = Background(ALONE)

    def slow(group):
        started.wait(5)
        done.append(1)

    background.submit(slow)
    background.check()
    started.set()
    background.submit(lambda group: done.append(2))
    background.settle()
    assert done == [1, 2]

    def broken(group):
        raise OSError(28, "full")

    background.submit(broken)
    with pytest.raises(OSError, match="full"):
        background.settle()
    background.settle()


KILLED = """
import os, sys, time
from pathlib import Path
from glassformer.training import checkpoint, train
from tests.training import tiny
rename = os.rename
def stuck(source, target):
    if "step-00000010" in str(target):
        print("writing", flush=True)
        time.sleep(60)
    rename(source, target)
os.rename = stuck
session = tiny.session(Path(sys.argv[1]), "checkpoint.background=true", "loop.eval_every=100", "loop.steps=10000")
train(session.run, session.data)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_has_its_last_checkpoint(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        os.kill(process.pid, 9)
    assert checkpoint.read(tmp_path / "run")[1]["step"] == 5
    assert list((tmp_path / "run" / "checkpoints").glob(".writing-*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp tensor"])
def test_ranks_write_behind_the_steps(tmp_path, kind):
    corpus(tmp_path)
    parallel, _, divided = kind.partition(" ")
    changes = (f"machine.parallel={parallel}", "loop.checkpoint_every=3", "loop.keep=9")
    changes += (f"machine.{divided}=2", "model.n_heads=4", "model.d_model=32") if divided else ()
    together(tmp_path, 2, [job(tmp_path, "at-once", *changes), job(tmp_path, "behind", *changes, ON)])
    assert curve(tmp_path / "at-once") == curve(tmp_path / "behind")
    held = [path.name for path in checkpoint.steps(tmp_path / "at-once")]
    assert held == [path.name for path in checkpoint.steps(tmp_path / "behind")]
    for step in held:
        for name in FILES:
            a, b = (tmp_path / run / "checkpoints" / step / name for run in ("at-once", "behind"))
            assert a.read_bytes() == b.read_bytes(), (step, name)
    assert resume_session(str(tmp_path / "behind" / "checkpoints" / held[3])).resume[0]["step"] > 0
