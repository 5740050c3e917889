"""From a request to an answer: bodies read and checked, work queued, errors turned into sentences."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from glassformer.studio import openai
from glassformer.studio.canned import Canned
from glassformer.studio.engine import Engine
from glassformer.studio.errors import (
    LoadingError,
    StudioError,
    UnknownError,
)
from glassformer.studio.events import EventStream, Work, frame, left, stream_job
from glassformer.studio.jobs import Jobs, Ticket
from glassformer.studio.schema import Asked, explain
from glassformer.studio.settings import Settings
from glassformer.studio.shelf import Shelf
from glassformer.studio.training import Trainings
from glassformer.studio.wire import MEDIA_TYPE, Packet, to_json

log = logging.getLogger("glassformer.studio")
BODY_SECONDS = 30.0
READY_SECONDS = 120.0
A = TypeVar("A", bound=Asked)
T = TypeVar("T")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


class Studio:
    """What all requests of one server share."""

    def __init__(self, settings: Settings):
        limits = settings.limits
        self.settings = settings
        self.engine = Engine(settings.warm, limits.quick_workers)
        self.trainings = Trainings(settings.folder, limits)
        self.shelf = Shelf(settings.models, limits.models, self.trainings.models)
        self.quick = Jobs("quick", limits.quick_workers, limits.quick_waiting)
        self.long = Jobs("long", 1, limits.long_waiting)
        self.canned = Canned()
        self.streams = 0

    def stream_closed(self) -> None:
        self.streams -= 1

    def close(self) -> None:
        for jobs in (self.quick, self.long):
            jobs.stop()
        self.trainings.close()

    def from_the_can(self, path: str, request: Request, asked: Asked) -> Response | None:
        """An answer computed at build time, as long as torch is not there; None: compute it."""
        if self.engine.state == "ready":
            return None
        wanted = MEDIA_TYPE in request.headers.get("accept", "")
        found = self.canned.find(path, asked, wanted) or self.canned.find(path, asked, path != "next")
        return None if found is None else Response(found[0], media_type=found[1])

    async def body(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await request.body()
        except TimeoutError:
            raise StudioError(f"the body did not come within {BODY_SECONDS:g} s: send it again.") from None

    async def read(self, request: Request, kind: type[A]) -> A:
        """The body as a request of a kind. JSON only: a form of another site could not send that."""
        sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sent != "application/json":
            raise StudioError(f"a body is application/json, not {sent[:60] or 'of no type'}.")
        return kind.model_validate_json(await self.body(request))

    async def ready(self) -> None:
        """Wait until torch is there: for clients that know nothing of loading."""
        self.engine.start()
        for _ in range(int(READY_SECONDS * 20)):
            if self.engine.done.is_set():
                break
            await asyncio.sleep(0.05)
        self.engine.require()

    async def work(self, request: Request, function: Callable[[Ticket], T]) -> T:
        """The function's result, computed in the quick queue; it ends with its client."""
        running = asyncio.create_task(self.quick.run(function, self.settings.limits.quick_seconds))
        leaving = asyncio.create_task(left(request.receive))
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise ClientDisconnect
            return running.result()
        finally:
            for task in (running, leaving):
                task.cancel()
            await asyncio.gather(running, leaving, return_exceptions=True)

    async def answer(self, request: Request, function: Callable[[Ticket], Any]) -> Response:
        """Plain data as JSON, a Packet as tensors; both are encoded in the worker."""

        def encoded(ticket: Ticket) -> tuple[bytes, str]:
            result = function(ticket)
            if isinstance(result, Packet):
                return result.encode(), MEDIA_TYPE
            return to_json(result), "application/json"

        data, kind = await self.work(request, encoded)
        return Response(data, media_type=kind)

    def stream(self, work: Work, is_long: bool, v1: bool = False) -> EventStream:
        """Events of a job; what goes wrong after the first byte is an `error` event."""
        limits = self.settings.limits
        jobs, seconds = (self.long, limits.long_seconds) if is_long else (self.quick, limits.quick_seconds)

        def failed(error: Exception) -> bytes:
            status, body = explained(error, v1)
            return frame(None if v1 else "error", {**body, "status": status})

        return stream_job(jobs, work, seconds, failed)


def explained(error: Exception, v1: bool = False) -> tuple[int, dict[str, Any]]:
    """Status and body of an error. Only what no input should cause is a 500, and is logged."""
    status, sentence, param = _explained(error)
    if v1:
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
        code = "model_not_found" if isinstance(error, UnknownError) else None
        return status, openai.error(sentence, param, code, kind.get(status, "invalid_request_error"))
    loading = {"loading": True} if isinstance(error, LoadingError) else {}
    return status, {"error": sentence, **loading}


def _explained(error: Exception) -> tuple[int, str, str | None]:
    match error:
        case ValidationError():
            sentence, not_json, field = explain(error)
            return (400 if not_json else 422), sentence, field
        case StudioError():
            return error.status, str(error), None
        case ValueError() | OverflowError():
            return 400, " ".join(str(error).split()) or "this cannot be computed.", None
    log.error("a request failed", exc_info=error)
    return 500, "the studio made a mistake; its log says which. It goes on.", None


def answered(handler: Callable[[Request], Awaitable[Any]], v1: bool = False) -> Callable[[Request], Awaitable[Any]]:
    """The handler with its errors as answers."""

    async def handle(request: Request) -> Any:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except LoadingError as error:
            status, body = explained(error, v1)
            # the page asks so: a 503 would stand in its console as an error, and waiting here would hold a connection
            waits = request.headers.get("prefer") == "respond-async"
            return json_response(body, 202 if waits else status, {"retry-after": "1"})
        except Exception as error:
            status, body = explained(error, v1)
            return json_response(body, status, {"retry-after": "1"} if status in (429, 503) else None)

    return handle
