"""A contender's process: asked, stopped, and ended whatever happens."""

import os
import signal
from pathlib import Path

import pytest

from glassformer.bench.peers.base import Order
from glassformer.bench.processes import Died, Worker, ask_once, ending_workers, environment

pytestmark = pytest.mark.usefixtures("fake_processes")


def order(**setting):
    return Order("fake", "ours", "decode", "float32", "", setting=setting)


def state(pid: int) -> str:
    """R running, S asleep, T stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_worker_runs_only_during_its_turn():
    with ending_workers() as workers:
        workers.append(Worker(order()))
        assert workers[0].load()["version"] == "1.0"
        workers[0].signal(signal.SIGSTOP)
        for turn in range(2):
            answer = workers[0].turn(turn)
            assert answer["units"] == 100.0
            os.waitid(os.P_PID, workers[0].process.pid, os.WSTOPPED | os.WNOWAIT)
            assert state(workers[0].process.pid) == "T"


def test_a_worker_that_dies_while_loading_reports_its_error():
    with pytest.raises(Died, match="RuntimeError: no weights here"):
        ask_once(order(die_at="load"))


def test_a_worker_that_dies_in_its_turn_reports_its_error():
    with ending_workers() as workers:
        workers.append(Worker(order(die_at=1)))
        workers[0].load()
        workers[0].turn(0)
        with pytest.raises(Died, match="MemoryError"):
            workers[0].turn(1)


def test_advice_after_the_error_is_not_its_last_word():
    with pytest.raises(Died) as death:
        ask_once(order(die_at="load", advice="Set VERBOSE=1 for more"))
    assert str(death.value) == "RuntimeError: no weights here"


def test_a_killed_worker_reports_the_signal():
    with ending_workers() as workers:
        workers.append(Worker(order()))
        workers[0].load()
        workers[0].signal(signal.SIGKILL)
        workers[0].process.wait()
        with pytest.raises(Died, match="ended by SIGKILL after: loading"):
            workers[0].turn(0)


def test_a_silent_worker_reaches_the_time_limit():
    with ending_workers() as workers:
        workers.append(Worker(order(silent=True)))
        workers[0].send(workers[0].order.to_json())
        with pytest.raises(Died, match="gave no answer in 0 s"):
            workers[0].receive(0.2)


def test_an_interrupt_ends_all_stopped_ones_included():
    held = []

    def interrupted():
        with ending_workers() as workers:
            for _ in range(2):
                workers.append(Worker(order()))
                workers[-1].load()
                workers[-1].signal(signal.SIGSTOP)
                held.append(workers[-1].process.pid)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not any(is_alive(pid) for pid in held)


def test_the_environment_carries_the_threads():
    assert environment(3)["OMP_NUM_THREADS"] == "3"


def test_caches_of_compiled_code_can_be_moved_together(tmp_path):
    usual, own = environment(1), environment(1, "cpu", tmp_path)
    moved = {name for name in own if own[name] != usual.get(name)}
    assert moved == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "GLASSFORMER_CACHE"}
    assert all(own[name].startswith(f"{tmp_path}/") for name in moved)
    assert len({own[name] for name in moved}) == 3


def test_compilers_keep_their_threads_on_a_gpu(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    assert environment(1)["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in environment(1, "cuda")
