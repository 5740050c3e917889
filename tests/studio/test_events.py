import json
import threading
import time

import anyio
import pytest

from glassformer.studio import events
from glassformer.studio.errors import BusyError
from glassformer.studio.events import encode_event, stream_iterator, stream_job
from glassformer.studio.jobs import WorkerPool, check_cancelled
from tests.studio.serving import parse_events


def encode_error(error):
    return encode_event("error", {"error": str(error)})


async def receive_body(response, until=None):
    """What a client receives; it disconnects after `until` bytes."""
    body, gone = bytearray(), anyio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        body.extend(message.get("body", b""))
        if until is not None and len(body) >= until:
            gone.set()
            await anyio.sleep(0.01)

    await response({"type": "http"}, receive, send)
    return body.decode()


def listen(work, seconds=5.0, until=None):
    """What a client receives from a job; afterwards the pool must be empty."""

    async def main():
        pool = WorkerPool(workers=1, waiting=0)
        body = await receive_body(stream_job(pool, work, seconds, encode_error), until)
        assert pool.load == 0
        assert await pool.run(lambda: 1, 5) == 1
        return body

    return anyio.run(main)


def test_events_arrive_in_order_and_the_stream_ends():
    def work(emit):
        for n in range(3):
            emit("n", {"n": n})
        emit(None, b"[DONE]")

    assert parse_events(listen(work)) == [("n", {"n": 0}), ("n", {"n": 1}), ("n", {"n": 2}), (None, "[DONE]")]


def test_a_job_that_fails_ends_with_an_error_event():
    def work(emit):
        emit("a", 1)
        raise ValueError("no")

    assert parse_events(listen(work)) == [("a", 1), ("error", {"error": "no"})]


def test_a_job_that_exceeds_its_time_limit_ends_with_an_error_event():
    ended = threading.Event()

    def work(emit):
        try:
            while True:
                check_cancelled()
                time.sleep(0.001)
        finally:
            ended.set()

    received = parse_events(listen(work, seconds=0.2))
    assert [name for name, _ in received] == ["error"]
    assert "longer than" in received[0][1]["error"]
    assert ended.is_set()


def test_a_job_ends_when_its_client_disconnects():
    emitted, ended = [], threading.Event()

    def work(emit):
        try:
            while True:
                emit("x", {})
                emitted.append(1)
                time.sleep(0.001)
        finally:
            ended.set()

    listen(work, until=200)
    assert ended.is_set()
    count = len(emitted)
    time.sleep(0.05)
    assert len(emitted) == count


def test_a_job_that_waits_for_a_slow_client_ends_when_that_disconnects(monkeypatch):
    """Not as an Exception: a job that turns every Exception into a result must not record a failure."""
    monkeypatch.setattr(events, "BUFFERED_EVENTS", 2)
    caught = []

    def work(emit):
        try:
            while True:
                emit("x", {"a": 1})
        except Exception as error:
            caught.append(error)

    async def main():
        pool, gone, sent = WorkerPool(workers=1, waiting=0), anyio.Event(), []

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if len(sent) == 3:  # the client reads no more: the buffer fills up and the job waits
                async with anyio.create_task_group() as group:
                    group.start_soon(anyio.sleep, 0.1)
                gone.set()
                await anyio.sleep_forever()

        with anyio.fail_after(10):
            await stream_job(pool, work, 60, encode_error)({"type": "http"}, receive, send)
        assert pool.load == 0

    anyio.run(main)
    assert caught == []


def test_a_job_waits_for_a_slow_client_and_no_event_is_lost(monkeypatch):
    monkeypatch.setattr(events, "BUFFERED_EVENTS", 10)

    def work(emit):
        for n in range(200):
            emit("n", n)

    assert [data for _, data in parse_events(listen(work))] == list(range(200))


def test_a_full_queue_is_reported_before_the_stream_begins():
    async def main():
        pool, gate = WorkerPool(workers=1, waiting=0), threading.Event()
        first = stream_job(pool, lambda emit: gate.wait(5), 5, encode_error)
        with pytest.raises(BusyError):
            stream_job(pool, lambda emit: None, 5, encode_error)
        gate.set()
        await receive_body(first)
        assert pool.load == 0

    anyio.run(main)


def test_comments_keep_the_connection_of_a_silent_job_open(monkeypatch):
    monkeypatch.setattr(events, "PING_SECONDS", 0.05)
    assert listen(lambda emit: time.sleep(0.3)).count(": ping\n\n") >= 2


def test_the_events_of_an_iterator_are_sent_until_the_client_disconnects():
    closed = []

    async def forever():
        while True:
            yield encode_event("n", 1)
            await anyio.sleep(0.001)

    async def main():
        with anyio.fail_after(10):
            return await receive_body(stream_iterator(forever(), lambda: closed.append(1)), until=100)

    assert parse_events(anyio.run(main))[0] == ("n", 1)
    assert closed == [1]


def test_the_data_of_an_event_is_one_line():
    text = encode_event("a", {"t": "x\ny\r\u2028"}, "7").decode()
    assert text.startswith("id: 7\nevent: a\ndata: ")
    assert text.count("\n") == 4
    assert json.loads(text.splitlines()[2][6:]) == {"t": "x\ny\r\u2028"}
