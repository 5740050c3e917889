"""The process that is started once: it outlives its children, and starts again when it dies."""

import os
import signal
import threading

import pytest

from glassformer.theory.exercises import worker as module
from glassformer.theory.exercises.exercise import ExerciseError
from glassformer.theory.exercises.worker import Worker


def job(body, seconds=5):
    source = f"def f(x):\n    {body}\n    return x"
    return {"source": source, "function": "f", "cases": [{"x": 1}], "seconds": seconds, "memory": 1 << 30}


def test_it_runs_one_job_after_another_and_ends():
    with Worker() as worker:
        for _ in range(3):
            ended = worker.run(job("pass"), 10)
            assert (ended.code, ended.late) == (0, False)
            assert b'"event": "end"' in ended.output
        crashed = worker.run(job("import os; os.kill(os.getpid(), 11)"), 10)
        assert crashed.code == -signal.SIGSEGV
        assert worker.run(job("import time; time.sleep(60)"), 0.5).late
        pid, folder = worker._process.pid, worker._folder.name
        assert worker.run(job("pass"), 10).code == 0
        assert worker._process.pid == pid
        assert os.listdir(folder) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not os.path.exists(folder)


def test_it_starts_again_after_it_was_killed():
    with Worker() as worker:
        assert worker.run(job("pass"), 10).code == 0
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        assert worker.run(job("pass"), 10).code == 0


def test_a_flood_of_events_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "MOST", 1 << 20)
    flood = "import os\n    for i in range(300): [os.write(fd, b'x' * 60000) for fd in range(3, 9) if _open(fd)]"
    source = "import os\ndef _open(fd):\n    try: return os.fstat(fd)\n    except OSError: return None\n"
    with Worker() as worker:
        long = job(flood)
        ended = worker.run({**long, "source": source + long["source"]}, 10)
        assert len(ended.output) < 2 << 20
        assert worker.run(job("pass"), 10).code == 0


def test_it_refuses_windows_in_one_sentence(monkeypatch):
    monkeypatch.setattr(module.os, "name", "nt")
    with pytest.raises(ExerciseError, match="grading needs Linux or macOS"):
        Worker()._start()


def test_a_process_that_cannot_start_is_reported_in_one_sentence():
    with Worker(["no_such_module"]) as worker, pytest.raises(ExerciseError, match="import numpy, no_such_module"):
        worker.run(job("pass"), 10)


def test_a_job_whose_process_is_killed_counts_as_killed():
    """For example by the system, for lack of memory."""
    with Worker() as worker:
        worker.run(job("pass"), 10)
        kill = threading.Timer(1.0, os.kill, [worker._process.pid, signal.SIGKILL])
        kill.start()
        ended = worker.run(job("import time; time.sleep(60)", 60), 60)
        assert (ended.code, ended.late) == (-signal.SIGKILL, False)
        assert worker.run(job("pass"), 10).code == 0
