"""Server-Sent Events: a job in a thread tells what happens, the client hears it as it comes.

`event: NAME`, `data: JSON`, a comment every ten seconds so that a dead connection is noticed. When the client goes, the
job is cancelled; a job that passes its deadline ends with an `error` event, as does one that fails.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from glassformer.studio.jobs import Jobs, Ticket, tell
from glassformer.studio.wire import to_json

PING_SECONDS = 10.0
BACKLOG = 1000
"""Events that may wait for a slow reader before the job waits for it."""
Emit = Callable[[str | None, Any], None]
"""Name and data of an event; without a name, data alone."""
Work = Callable[[Ticket, Emit], None]


def frame(name: str | None, data: Any, id: str | None = None) -> bytes:
    """One event as it goes over the wire. JSON has no line breaks, so `data` is one line. No name: data alone."""
    head = (b"" if id is None else b"id: %b\n" % id.encode()) + (
        b"" if name is None else b"event: %b\n" % name.encode()
    )
    return head + b"data: " + (data if isinstance(data, bytes) else to_json(data)) + b"\n\n"


class EventStream:
    """An ASGI response that sends frames as they come and calls `closed` when it ends, for whatever reason."""

    def __init__(self, frames: AsyncIterator[bytes], closed: Callable[[], None]):
        self.frames, self.closed = frames, closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        tasks: set[asyncio.Task[None]] = set()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            tasks = {asyncio.create_task(self._send(send)), asyncio.create_task(left(receive))}
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.closed()
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    async def _send(self, send: Send) -> None:
        async for part in with_pings(self.frames):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def left(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_pings(frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The frames, and a comment whenever none came for a while."""
    following = asyncio.ensure_future(anext(frames, None))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=PING_SECONDS)
            if not done:
                yield b": ping\n\n"
                continue
            part = following.result()
            if part is None:
                return
            yield part
            following = asyncio.ensure_future(anext(frames, None))
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await following


def stream_job(jobs: Jobs, work: Work, seconds: float, failed: Callable[[Exception], bytes]) -> EventStream:
    """A job whose events are the response; `failed` makes the last frame of one that raised.

    Raises BusyError before anything is sent.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    ticket = Ticket()

    def emit(name: str | None, data: Any) -> None:
        ticket.check()
        if queue.qsize() > BACKLOG:  # the reader is slow: wait for it here, in the worker
            asyncio.run_coroutine_threadsafe(_drained(queue, ticket), loop).result()
        tell(loop, queue.put_nowait, frame(name, data))

    def job() -> None:
        try:
            work(ticket, emit)
        except Exception as error:
            tell(loop, queue.put_nowait, failed(error))
        tell(loop, queue.put_nowait, None)

    jobs.submit(ticket, job)
    late = frame("error", {"error": f"this took longer than {seconds:g} s and was stopped: ask for less."})
    return EventStream(_until(queue, loop.time() + seconds, late), lambda: jobs.drop(ticket))


async def _until(queue: "asyncio.Queue[bytes | None]", deadline: float, late: bytes) -> AsyncIterator[bytes]:
    """What the queue gives until None; `late` when the deadline comes first."""
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                part = await queue.get()
        except TimeoutError:
            yield late
            return
        if part is None:
            return
        yield part


async def _drained(queue: "asyncio.Queue[bytes | None]", ticket: Ticket) -> None:
    while queue.qsize() > BACKLOG // 2 and not ticket.cancelled:
        await asyncio.sleep(0.02)
