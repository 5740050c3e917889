import asyncio
import threading
import time

import pytest

from glassformer.studio import jobs as jobs_module
from glassformer.studio import training
from glassformer.studio.errors import BusyError, TooLongError
from glassformer.studio.jobs import Cancelled, Jobs, Ticket
from tests.studio.serving import wait_until


@pytest.fixture
def jobs():
    made = Jobs("test", workers=2, waiting=3)
    yield made
    made.stop()
    wait_until(lambda: not any(thread.is_alive() for thread in made._threads), 10)


def endless(started, ended):
    """A job that never asks whether it should go on."""

    def work(ticket):
        started.set()
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    return work


def test_a_job_gives_its_result(jobs):
    assert asyncio.run(jobs.run(lambda ticket: 41 + 1, 5)) == 42


def test_what_a_job_raises_is_raised_to_who_waits(jobs):
    def fail(ticket):
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(jobs.run(fail, 5))
    assert asyncio.run(jobs.run(lambda ticket: 1, 5)) == 1  # and the worker goes on


def test_a_job_that_passes_its_deadline_is_ended_although_it_never_asks(jobs):
    started, ended = threading.Event(), threading.Event()
    with pytest.raises(TooLongError, match=r"0\.2 s"):
        asyncio.run(jobs.run(endless(started, ended), 0.2))
    assert ended.wait(5)
    wait_until(lambda: jobs.load == 0)
    assert asyncio.run(jobs.run(lambda ticket: 1, 5)) == 1


def test_a_timeout_of_the_jobs_own_is_not_taken_for_the_deadline(jobs):
    def fail(ticket):
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(jobs.run(fail, 5))


def test_a_job_dies_with_who_waits_for_it(jobs):
    started, ended = threading.Event(), threading.Event()

    async def leave():
        task = asyncio.create_task(jobs.run(endless(started, ended), 60))
        while not started.is_set():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert ended.wait(5)


def test_a_full_queue_refuses_at_once_and_takes_work_again_afterwards(jobs):
    gate = threading.Event()

    async def fill():
        waiting = [asyncio.create_task(jobs.run(lambda ticket: gate.wait(10), 20)) for _ in range(5)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        with pytest.raises(BusyError):
            await jobs.run(lambda ticket: 1, 5)
        assert time.monotonic() - began < 0.5
        gate.set()
        assert await asyncio.gather(*waiting) == [True] * 5
        assert await jobs.run(lambda ticket: 7, 5) == 7

    asyncio.run(fill())


def test_a_job_that_still_waits_is_taken_out_of_the_queue(jobs):
    gate, ran = threading.Event(), []

    async def fill():
        first = [asyncio.create_task(jobs.run(lambda ticket: gate.wait(10), 20)) for _ in range(2)]
        await asyncio.sleep(0.05)
        third = asyncio.create_task(jobs.run(lambda ticket: ran.append(1), 20))
        await asyncio.sleep(0.05)
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        gate.set()
        await asyncio.gather(*first)

    asyncio.run(fill())
    wait_until(lambda: jobs.load == 0)
    assert ran == []


def test_a_cancellation_never_reaches_the_next_job_of_the_thread():
    """Tickets are cancelled at random moments around the end of their job; the jobs after them must all finish."""
    pool, results = Jobs("race", workers=1, waiting=10_000), []

    def count(ticket):
        return sum(range(200))

    for number in range(400):
        hurt, done = Ticket(), threading.Event()
        pool.submit(hurt, lambda: count(None))
        pool.submit(Ticket(), lambda done=done, number=number: (results.append(number), done.set()))
        time.sleep(0.00002 * (number % 13))
        hurt.cancel()
        assert done.wait(5), number
    pool.stop()
    assert results == list(range(400))


def test_a_cancellation_that_was_lost_is_raised_again(monkeypatch):
    monkeypatch.setattr(jobs_module, "LOST", 0.05)
    ticket, begun, lost = Ticket(), threading.Event(), []

    def swallow_the_first():
        begun.set()
        try:
            while True:
                time.sleep(0.001)
        except Cancelled:  # as a callback of the garbage collector would
            lost.append(True)
        while True:
            time.sleep(0.001)

    def work():
        with pytest.raises(Cancelled):
            ticket.run(swallow_the_first)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait(5)
    ticket.cancel()
    thread.join(5)
    assert lost
    assert not thread.is_alive()


def test_a_cancelled_ticket_runs_nothing():
    ticket = Ticket()
    ticket.cancel()
    with pytest.raises(Cancelled):
        ticket.run(lambda: 1)
    with pytest.raises(Cancelled):
        ticket.check()


def in_a_thread(ticket, work):
    """Start some work; what is set once it was cancelled."""
    ended = threading.Event()

    def job():
        try:
            ticket.run(work)
        except Cancelled:
            ended.set()

    threading.Thread(target=job, daemon=True).start()
    return ended


def test_an_import_is_let_finish_before_a_job_ends(tmp_path, monkeypatch):
    """A module whose import is broken off would stay half-imported for every later request."""
    (tmp_path / "slow_module.py").write_text("import time\nfor _ in range(150):\n    time.sleep(0.002)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    ticket, began = Ticket(), threading.Event()

    def work():
        began.set()
        import slow_module  # noqa: F401

        while True:
            time.sleep(0.001)

    ended = in_a_thread(ticket, work)
    began.wait(5)
    time.sleep(0.05)
    ticket.cancel()
    assert ended.wait(5)
    import slow_module

    assert slow_module.whole


def test_what_opens_files_and_processes_is_let_finish_before_a_job_ends(tmp_path, monkeypatch):
    """A file that was opened and not yet entered would stay open, and a run could be started that nobody knows of."""
    (tmp_path / "events.jsonl").write_text('{"event": "step"}\n' * 100)
    ticket, began, parsed = Ticket(), threading.Event(), []

    def slowly(line):
        began.set()
        time.sleep(0.002)
        parsed.append(line)

    monkeypatch.setattr(training, "parse", slowly)

    def work():
        training.Run(tmp_path).last_events()
        while True:
            time.sleep(0.001)

    ended = in_a_thread(ticket, work)
    began.wait(5)
    ticket.cancel()
    assert ended.wait(5)
    assert len(parsed) == 101  # the end of the last line is one more
