import asyncio
import json
import threading
import time

import pytest

from glassformer.studio import events
from glassformer.studio.errors import BusyError
from glassformer.studio.events import frame, stream_job
from glassformer.studio.jobs import Jobs
from tests.studio.serving import parse_events, wait_until


@pytest.fixture
def jobs():
    made = Jobs("test", workers=1, waiting=0)
    yield made
    made.stop()


def failed(error):
    return frame("error", {"error": str(error)})


async def listen(jobs, work, seconds=5.0, until=None):
    """What a client hears; it leaves after `until` characters."""
    said, gone = bytearray(), asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        said.extend(message.get("body", b""))
        if until is not None and len(said) >= until:
            gone.set()
            await asyncio.sleep(0.01)

    await stream_job(jobs, work, seconds, failed)({"type": "http"}, receive, send)
    return said.decode()


def test_events_come_in_order_and_end(jobs):
    def work(ticket, emit):
        for n in range(3):
            emit("n", {"n": n})
        emit(None, b"[DONE]")

    heard = parse_events(asyncio.run(listen(jobs, work)))
    assert heard == [("n", {"n": 0}), ("n", {"n": 1}), ("n", {"n": 2}), (None, "[DONE]")]


def test_a_job_that_fails_says_so_as_its_last_event(jobs):
    def work(ticket, emit):
        emit("a", 1)
        raise ValueError("no")

    assert parse_events(asyncio.run(listen(jobs, work))) == [("a", 1), ("error", {"error": "no"})]


def test_a_late_job_is_ended_and_told(jobs):
    ended = threading.Event()

    def work(ticket, emit):
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.set()

    heard = parse_events(asyncio.run(listen(jobs, work, seconds=0.2)))
    assert heard[0][0] == "error"
    assert "longer than" in heard[0][1]["error"]
    assert ended.wait(5)


def test_a_job_ends_when_its_client_goes(jobs):
    ended = threading.Event()

    def work(ticket, emit):
        try:
            while True:
                emit("x", {})
        finally:
            ended.set()

    asyncio.run(listen(jobs, work, until=200))
    assert ended.wait(5)
    wait_until(lambda: jobs.load == 0)


def test_a_job_waits_for_a_slow_reader_and_drops_nothing(jobs, monkeypatch):
    monkeypatch.setattr(events, "BACKLOG", 10)

    def work(ticket, emit):
        for n in range(200):
            emit("n", n)

    heard = parse_events(asyncio.run(listen(jobs, work)))
    assert [data for _, data in heard] == list(range(200))


def test_a_full_queue_is_told_before_the_stream_begins(jobs):
    gate = threading.Event()

    async def both():
        stream_job(jobs, lambda ticket, emit: gate.wait(5), 5, failed)
        with pytest.raises(BusyError):
            stream_job(jobs, lambda ticket, emit: None, 5, failed)
        gate.set()

    asyncio.run(both())


def test_a_silent_job_is_kept_alive_by_comments(jobs, monkeypatch):
    monkeypatch.setattr(events, "PING_SECONDS", 0.05)
    text = asyncio.run(listen(jobs, lambda ticket, emit: time.sleep(0.3)))
    assert text.count(": ping\n\n") >= 2


def test_a_frame_is_one_line_of_data():
    text = frame("a", {"t": "x\ny\r\u2028"}, "7").decode()
    assert text.startswith("id: 7\nevent: a\ndata: ")
    assert text.count("\n") == 4
    assert json.loads(text.splitlines()[2][6:]) == {"t": "x\ny\r\u2028"}
