import threading
import time
from functools import partial

import anyio
import pytest
import torch
from torch import nn

from glassformer.studio import training
from glassformer.studio.errors import BusyError, TimeLimitError
from glassformer.studio.jobs import WorkerPool, check_cancelled, with_torch_checks
from tests.studio.serving import wait_until


def run(test):
    """Run an async test with a pool of two workers and a queue of three; no thread may be left afterwards."""
    before = set(threading.enumerate())

    async def main():
        pool = WorkerPool(workers=2, waiting=3)
        try:
            await test(pool)
        finally:
            pool.close()

    anyio.run(main)
    wait_until(lambda: set(threading.enumerate()) <= before, 10)


class Job:
    """A job that runs until it is cancelled."""

    def __init__(self):
        self.started, self.ended, self.rounds = threading.Event(), threading.Event(), 0

    def step(self):
        check_cancelled()
        time.sleep(0.001)

    def __call__(self):
        self.started.set()
        try:
            while True:
                self.step()
                self.rounds += 1
        finally:
            self.ended.set()

    async def wait_for_start(self):
        while not self.started.is_set():
            await anyio.sleep(0.005)


async def cancel_after_start(pool, job, function=None):
    """Run a job and cancel the task that waits for it, as a disconnecting client does."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, function or job, 60)
            await job.wait_for_start()
            scope.cancel()


def test_a_job_returns_its_result():
    async def test(pool):
        assert await pool.run(lambda: 41 + 1, 5) == 42

    run(test)


def test_the_exception_of_a_job_is_raised_where_its_result_is_awaited():
    def fail():
        raise KeyError("x")

    async def test(pool):
        with pytest.raises(KeyError):
            await pool.run(fail, 5)
        assert await pool.run(lambda: 1, 5) == 1

    run(test)


def test_a_job_ends_at_its_time_limit():
    async def test(pool):
        job = Job()
        with pytest.raises(TimeLimitError, match=r"0\.2 s"):
            await pool.run(job, 0.2)
        assert job.ended.is_set()
        assert pool.load == 0
        assert await pool.run(lambda: 1, 5) == 1

    run(test)


def test_a_timeout_error_of_the_job_is_not_mistaken_for_the_time_limit():
    def fail():
        raise TimeoutError("mine")

    async def test(pool):
        with pytest.raises(TimeoutError, match="mine"):
            await pool.run(fail, 5)

    run(test)


def test_a_job_that_waits_in_the_queue_ends_at_its_time_limit_without_running():
    async def test(pool):
        gate, ran = threading.Event(), []
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(pool.run, partial(gate.wait, 10), 20)
            await anyio.sleep(0.05)
            with pytest.raises(TimeLimitError):
                await pool.run(lambda: ran.append(1), 0.1)
            gate.set()
        assert ran == []

    run(test)


def test_a_cancelled_job_stops_at_its_next_check():
    async def test(pool):
        job = Job()
        await cancel_after_start(pool, job)
        assert job.ended.is_set()  # the waiting task returns only when the thread is free again
        rounds = job.rounds
        await anyio.sleep(0.02)
        assert job.rounds == rounds
        assert pool.load == 0

    run(test)


def test_a_task_cancelled_by_asyncio_itself_cancels_its_job():
    """uvicorn does so with requests that are still open when the server shuts down."""
    import asyncio

    async def test(pool):
        job = Job()
        task = asyncio.create_task(pool.run(job, 60))
        await job.wait_for_start()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await anyio.to_thread.run_sync(partial(job.ended.wait, 5))
        assert job.ended.is_set()

    run(test)


def test_each_call_of_a_torch_function_is_a_check():
    """A model knows nothing of the studio and is stopped between two operations all the same."""

    class Forever(Job, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            Job.__init__(self)
            self.layer = nn.Linear(3, 3)

        def step(self):
            with torch.no_grad():
                self.layer(torch.ones(1, 3))

        forward = __call__ = Job.__call__

    async def test(pool):
        job = Forever()
        with anyio.fail_after(20):
            await cancel_after_start(pool, job, lambda: with_torch_checks(job))
        assert job.ended.is_set()

    run(test)


def test_torch_checks_change_no_result_and_end_with_the_job():
    x = torch.randn(4, 5)
    assert torch.equal(with_torch_checks(lambda: torch.softmax(x @ x.T, -1)), torch.softmax(x @ x.T, -1))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_check_outside_a_job_does_nothing():
    check_cancelled()


def test_except_exception_does_not_swallow_the_cancellation():
    class Stubborn(Job):
        def step(self):
            try:
                super().step()
            except Exception:
                pytest.fail("the cancellation was caught")

    async def test(pool):
        await cancel_after_start(pool, Stubborn())

    run(test)


def test_a_full_queue_refuses_at_once_and_accepts_jobs_again_afterwards():
    async def test(pool):
        gate, results = threading.Event(), []

        async def one():
            results.append(await pool.run(partial(gate.wait, 10), 20))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(one)
            await anyio.sleep(0.05)
            assert pool.load == 5
            with anyio.fail_after(0.5), pytest.raises(BusyError):
                await pool.run(lambda: 1, 5)
            gate.set()
        assert results == [True] * 5
        assert await pool.run(lambda: 7, 5) == 7

    run(test)


def test_a_job_cancelled_in_the_queue_never_runs():
    async def test(pool):
        gate, ran = threading.Event(), []
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(pool.run, partial(gate.wait, 10), 20)
            await anyio.sleep(0.05)
            with anyio.move_on_after(0.05):
                await pool.run(lambda: ran.append(1), 20)
            assert pool.load == 2
            gate.set()
        assert pool.load == 0
        assert ran == []

    run(test)


def test_no_more_threads_run_than_there_are_workers():
    """A cancelled job keeps its worker until it has ended: a new job must not start next to it."""

    async def test(pool):
        gate, before = threading.Event(), threading.active_count()
        for _ in range(4):
            with anyio.move_on_after(0.02):
                async with anyio.create_task_group() as group:
                    group.start_soon(pool.run, Job(), 20)
                    group.start_soon(pool.run, Job(), 20)
        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(pool.run, partial(gate.wait, 10), 20)
            await anyio.sleep(0.05)
            assert threading.active_count() <= before + 2
            gate.set()

    run(test)


def test_a_cancellation_never_reaches_the_next_job_of_the_thread():
    """Jobs are cancelled at various moments around their end; the jobs after them must all finish."""

    async def test(pool):
        for number in range(200):
            with anyio.move_on_after(0.00005 * (number % 13)):
                await pool.run(lambda: [check_cancelled() for _ in range(20)], 5)
            assert await pool.run(lambda number=number: (check_cancelled(), number)[1], 5) == number

    run(test)


def test_a_closed_pool_cancels_its_jobs_and_refuses_new_ones():
    async def test(pool):
        job = Job()

        async def refused():
            with pytest.raises(BusyError, match="shutting down"):
                await pool.run(job, 60)

        async with anyio.create_task_group() as group:
            group.start_soon(refused)
            await job.wait_for_start()
            pool.close()
        assert job.ended.is_set()
        with pytest.raises(BusyError):
            await pool.run(lambda: 1, 5)

    run(test)


def test_an_import_is_finished_before_a_job_ends(tmp_path, monkeypatch):
    """A module whose import is interrupted would stay half-imported for every later request."""
    (tmp_path / "slow_module.py").write_text("import time\nfor _ in range(50):\n    time.sleep(0.002)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Importing(Job):
        def step(self):
            import slow_module

            assert slow_module.whole
            super().step()

    async def test(pool):
        await cancel_after_start(pool, Importing())

    run(test)
    import slow_module

    assert slow_module.whole


def test_a_cancelled_job_leaves_no_file_open(tmp_path, monkeypatch):
    """A thread is never interrupted between opening a file and its `with`: what reads a file reads all of it."""
    (tmp_path / "events.jsonl").write_text('{"event": "step"}\n' * 100)
    job, parsed, opened = Job(), [], []
    open_file = training.Path.open

    def record_open(*args, **kwargs):
        opened.append(open_file(*args, **kwargs))
        return opened[-1]

    def slowly(line):
        job.started.set()
        time.sleep(0.001)
        parsed.append(line)

    monkeypatch.setattr(training, "parse", slowly)
    monkeypatch.setattr(training.Path, "open", record_open)

    def work():
        training.Run(tmp_path).last_events()
        job()

    async def test(pool):
        await cancel_after_start(pool, job, work)

    run(test)
    assert len(parsed) == 101  # the end of the last line is one more
    assert [file.closed for file in opened] == [True]
