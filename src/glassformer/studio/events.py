"""Server-Sent Events: a job in a worker thread emits events, and the client receives them as they come.

An event is `event: NAME` and `data: JSON`. A comment every ten seconds keeps the connection open. When the client
disconnects, the job is cancelled. A job that fails or exceeds its time limit ends with an `error` event.
"""

import concurrent.futures
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import anyio.from_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.types import Receive, Scope, Send

from glassformer.studio.encoding import to_json
from glassformer.studio.jobs import WorkerPool, check_cancelled

PING = b": ping\n\n"
PING_SECONDS = 10.0
BUFFERED_EVENTS = 1000
"""Events that are buffered for a slow client before the job waits for it."""
Emit = Callable[[str | None, Any], None]
"""Send an event with this name and data. Without a name, only the data is sent."""
Work = Callable[[Emit], None]
Producer = Callable[[MemoryObjectSendStream[bytes]], Awaitable[None]]


def encode_event(name: str | None, data: Any, id: str | None = None) -> bytes:
    """Encode one event. JSON has no line breaks, so `data` is one line."""
    head = (b"" if id is None else b"id: %b\n" % id.encode()) + (
        b"" if name is None else b"event: %b\n" % name.encode()
    )
    return head + b"data: " + (data if isinstance(data, bytes) else to_json(data)) + b"\n\n"


class EventStream:
    """An ASGI response that sends what `produce` sends to its stream, until it returns or the client disconnects."""

    def __init__(self, produce: Producer, on_close: Callable[[], None]):
        self.produce, self.on_close = produce, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        sending, receiving = anyio.create_memory_object_stream[bytes](BUFFERED_EVENTS)

        async def produce() -> None:
            with sending:
                await self.produce(sending)

        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            with receiving:
                async with anyio.create_task_group() as group:
                    group.start_soon(cancel_on_disconnect, receive, group.cancel_scope)
                    group.start_soon(produce)
                    await _send_events(receiving, send)
                    group.cancel_scope.cancel()
        finally:
            sending.close()
            self.on_close()


async def _send_events(receiving: MemoryObjectReceiveStream[bytes], send: Send) -> None:
    """Send events until their producer ends, and a comment whenever there was none for a while."""
    while True:
        part = PING
        with anyio.move_on_after(PING_SECONDS):
            try:
                part = await receiving.receive()
            except anyio.EndOfStream:
                break
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel the scope when the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def stream_iterator(events: AsyncIterator[bytes], on_close: Callable[[], None]) -> EventStream:
    """Return a response that sends the events of an async iterator."""

    async def produce(stream: MemoryObjectSendStream[bytes]) -> None:
        async for event in events:
            await stream.send(event)

    return EventStream(produce, on_close)


def stream_job(pool: WorkerPool, work: Work, seconds: float, encode_error: Callable[[Exception], bytes]) -> EventStream:
    """Return a response that runs a job and sends its events; `encode_error` makes the last event of a failed job.

    Raises BusyError here, before anything is sent, if the pool's queue is full.
    """

    async def produce(stream: MemoryObjectSendStream[bytes]) -> None:
        def emit(name: str | None, data: Any) -> None:
            check_cancelled()
            try:
                anyio.from_thread.run(stream.send, encode_event(name, data))
            except concurrent.futures.CancelledError:  # cancelled while waiting for a slow client
                check_cancelled()
                raise

        try:
            await pool.run_reserved(lambda: work(emit), seconds)
        except Exception as error:
            await stream.send(encode_error(error))

    pool.reserve()
    return EventStream(produce, pool.release)
