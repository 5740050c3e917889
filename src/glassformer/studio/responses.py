"""From a request to a response: request bodies are parsed, jobs are queued, errors become JSON."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from glassformer.studio import openai
from glassformer.studio.encoding import MEDIA_TYPE, TensorResponse, to_json
from glassformer.studio.errors import LoadingError, NotFoundError, StudioError
from glassformer.studio.events import EventStream, Work, cancel_on_disconnect, encode_event, stream_job
from glassformer.studio.jobs import WorkerPool, with_torch_checks
from glassformer.studio.models import ModelStore
from glassformer.studio.recorded import RecordedResponses
from glassformer.studio.schema import ApiRequest, explain
from glassformer.studio.settings import Settings
from glassformer.studio.torch_loader import TorchLoader
from glassformer.studio.training import TrainingRuns

log = logging.getLogger("glassformer.studio")
BODY_SECONDS = 30.0
READY_SECONDS = 120.0
A = TypeVar("A", bound=ApiRequest)
T = TypeVar("T")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


class Studio:
    """State that all requests of one server share."""

    def __init__(self, settings: Settings):
        limits = settings.limits
        self.settings = settings
        self.torch_loader = TorchLoader(settings.warm, limits.quick_workers)
        self.training_runs = TrainingRuns(settings.folder, limits)
        self.models = ModelStore(settings.models, limits.models, self.training_runs.models, settings.adapters)
        self.quick = WorkerPool(limits.quick_workers, limits.quick_waiting)
        self.long = WorkerPool(1, limits.long_waiting)
        self.recorded = RecordedResponses()
        self.streams = 0

    def stream_closed(self) -> None:
        self.streams -= 1

    def close(self) -> None:
        for pool in (self.quick, self.long):
            pool.close()
        self.training_runs.close()

    def recorded_response(self, path: str, request: Request, body: ApiRequest) -> Response | None:
        """Return a response recorded at build time while torch is not imported yet; None if there is none."""
        if self.torch_loader.state == "ready":
            return None
        binary = MEDIA_TYPE in request.headers.get("accept", "")
        found = self.recorded.find(path, body, binary) or self.recorded.find(path, body, path != "next")
        return None if found is None else Response(found[0], media_type=found[1])

    async def read_body(self, request: Request) -> bytes:
        try:
            with anyio.fail_after(BODY_SECONDS):
                return await request.body()
        except TimeoutError:
            raise StudioError(f"the request body did not arrive within {BODY_SECONDS:g} s: send it again.") from None

    async def parse_body(self, request: Request, kind: type[A]) -> A:
        """Parse a JSON body. Other media types are refused: an HTML form of another site can only send those."""
        sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sent != "application/json":
            raise StudioError(f"Content-Type is {sent[:60] or 'missing'}: send application/json.")
        return kind.model_validate_json(await self.read_body(request))

    async def wait_for_torch(self) -> None:
        """Wait until torch is imported, for clients that do not know the studio's loading state."""
        self.torch_loader.start()
        for _ in range(int(READY_SECONDS * 20)):
            if self.torch_loader.done.is_set():
                break
            await anyio.sleep(0.05)
        self.torch_loader.require()

    async def run_job(self, request: Request, function: Callable[[], T]) -> T:
        """Return the function's result, computed in the quick pool. The job is cancelled if the client disconnects."""
        results: list[T] = []
        error: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(cancel_on_disconnect, request.receive, group.cancel_scope)
            try:
                results.append(await self.quick.run(function, self.settings.limits.quick_seconds))
            except Exception as raised:  # raised again below: a task group would wrap it in an ExceptionGroup
                error = raised
            group.cancel_scope.cancel()
        if error is not None:
            raise error
        if not results:
            raise ClientDisconnect
        return results[0]

    async def respond(self, request: Request, function: Callable[[], Any], torch_checks: bool = True) -> Response:
        """Respond with the function's result: plain data as JSON, a TensorResponse as safetensors.

        Both are encoded in the worker thread. `torch_checks=False` is for functions that check for cancellation
        themselves: the check at each torch call slows down small models.
        """

        def encoded() -> tuple[bytes, str]:
            result = with_torch_checks(function) if torch_checks else function()
            if isinstance(result, TensorResponse):
                return result.encode(), MEDIA_TYPE
            return to_json(result), "application/json"

        data, media_type = await self.run_job(request, encoded)
        return Response(data, media_type=media_type)

    def stream(self, work: Work, is_long: bool, v1: bool = False) -> EventStream:
        """Respond with the events of a job; an error after the first byte becomes an `error` event.

        Long jobs check for cancellation at each torch call, quick ones (text generation) between tokens.
        """
        limits = self.settings.limits
        pool, seconds = (self.long, limits.long_seconds) if is_long else (self.quick, limits.quick_seconds)

        def encode_error(error: Exception) -> bytes:
            status, body = describe_error(error, v1)
            return encode_event(None if v1 else "error", {**body, "status": status})

        if is_long:
            return stream_job(pool, lambda emit: with_torch_checks(lambda: work(emit)), seconds, encode_error)
        return stream_job(pool, work, seconds, encode_error)


def describe_error(error: Exception, v1: bool = False) -> tuple[int, dict[str, Any]]:
    """Return the status and body of an error response, in OpenAI's format if `v1`."""
    status, sentence, param = _classify(error)
    if v1:
        kind = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
        code = "model_not_found" if isinstance(error, NotFoundError) else None
        return status, openai.error(sentence, param, code, kind.get(status, "invalid_request_error"))
    loading = {"loading": True} if isinstance(error, LoadingError) else {}
    return status, {"error": sentence, **loading}


def _classify(error: Exception) -> tuple[int, str, str | None]:
    """Return (status, sentence, field). Anything that is not the client's error is logged and becomes a 500."""
    match error:
        case ValidationError():
            sentence, not_json, field = explain(error)
            return (400 if not_json else 422), sentence, field
        case StudioError():
            return error.status, str(error), None
        case ValueError() | OverflowError():
            return 400, " ".join(str(error).split()) or "this cannot be computed.", None
    log.error("a request failed", exc_info=error)
    return 500, "internal error of the studio: see its log for the traceback.", None


def with_error_responses(
    handler: Callable[[Request], Awaitable[Any]], v1: bool = False
) -> Callable[[Request], Awaitable[Any]]:
    """Wrap a handler so that its errors become responses."""

    async def handle(request: Request) -> Any:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)  # the client has disconnected and does not receive it
        except LoadingError as error:
            status, body = describe_error(error, v1)
            # The page prefers a 202: browsers log a 503 as an error in the console.
            accepted = request.headers.get("prefer") == "respond-async"
            return json_response(body, 202 if accepted else status, {"retry-after": "1"})
        except Exception as error:
            status, body = describe_error(error, v1)
            return json_response(body, status, {"retry-after": "1"} if status in (429, 503) else None)

    return handle
