"""The ASGI application: routes, handlers, the page and its static files. Imports no torch."""

import contextlib
import functools
import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from glassformer import __version__
from glassformer.errors import install
from glassformer.studio import chat, embeddings, openai, schema
from glassformer.studio.api import anatomy, cell, doctor, heads, playground, positions, size, snippets, stream, theory
from glassformer.studio.api import chat as chat_panel
from glassformer.studio.api import train as training_view
from glassformer.studio.encoding import MEDIA_TYPE
from glassformer.studio.errors import BusyError, StudioError
from glassformer.studio.events import stream_iterator
from glassformer.studio.jobs import with_torch_checks
from glassformer.studio.responses import Studio, json_response, with_error_responses
from glassformer.studio.security import SecurityMiddleware
from glassformer.studio.settings import Settings

STATIC = Path(__file__).parent / "static"

TORCH_VIEWS: dict[str, tuple[type[schema.ApiRequest], Callable[..., Any]]] = {
    "tokens": (schema.Tokens, playground.tokens),
    "vocabulary": (schema.ModelRequest, playground.vocabulary),
    "beam": (schema.Beam, playground.beam),
    "tensor": (schema.TensorRequest, anatomy.tensor),
    "cell": (schema.Cell, cell.cell),
    "patterns": (schema.Patterns, heads.patterns),
    "heads": (schema.HeadScores, heads.scores),
    "ablate": (schema.Ablate, heads.ablate),
    "lens": (schema.Lens, stream.lens),
    "attribution": (schema.Attribution, stream.attribution),
    "depth": (schema.TextRequest, stream.depth),
    "positions": (schema.Positions, positions.positions),
}
"""Views with a JSON body that need torch and return one response."""
CONFIG_VIEWS: dict[str, tuple[type[schema.ApiRequest], Callable[..., Any]]] = {
    "anatomy": (schema.ModelRequest, anatomy.anatomy),
    "size": (schema.Size, size.sheet),
}
"""Views that work without torch; their last argument is whether torch is imported."""
STREAMED_VIEWS: dict[str, tuple[type[schema.ApiRequest], Callable[..., Any], bool]] = {
    "generate": (schema.Generate, playground.generate, False),
    "chat": (schema.ChatPanel, chat_panel.chat, False),
    "patch": (schema.Patch, stream.patch, True),
    "doctor": (schema.Doctor, doctor.examine, True),
}
"""Views that return a stream of events; the last value is whether they run in the pool of long jobs."""


def create_app(settings: Settings | None = None) -> Starlette:
    """Return the studio as an ASGI application."""
    studio = Studio(settings or Settings())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        studio.training_runs.recover()
        try:
            yield
        finally:
            studio.close()

    app = Starlette(
        routes=_routes(studio),
        middleware=[Middleware(SecurityMiddleware, settings=studio.settings)],
        lifespan=lifespan,
        exception_handlers={404: _not_found, 405: _not_found},
    )
    app.state.studio = studio
    return app


def _routes(studio: Studio) -> list[Route | Mount]:
    def route(path: str, handler: Any, method: str = "GET", v1: bool = False) -> Route:
        return Route(path, with_error_responses(functools.partial(handler, studio), v1), methods=[method])

    posts = [
        *(route(f"/api/{name}", functools.partial(_torch_view, name), "POST") for name in TORCH_VIEWS),
        *(route(f"/api/{name}", functools.partial(_config_view, name), "POST") for name in CONFIG_VIEWS),
        *(route(f"/api/{name}", functools.partial(_streamed_view, name), "POST") for name in STREAMED_VIEWS),
        route("/api/next", _next, "POST"),
        route("/api/warm", _warm, "POST"),
        route("/api/claims/{id}/run", _run_claim, "POST"),
        route("/api/course/{id}", _course_action, "POST"),
        route("/api/train/upload", _upload, "POST"),
        route("/api/train/{run}/{action}", _run_action, "POST"),
        route("/api/train", _start_run, "POST"),
        route("/v1/completions", functools.partial(_complete, schema.CompletionRequest, COMPLETIONS), "POST", v1=True),
        route("/v1/chat/completions", functools.partial(_complete, schema.ChatRequest, CHATS), "POST", v1=True),
        route("/v1/embeddings", _embed, "POST", v1=True),
    ]
    gets = [
        route("/", _page),
        route("/static/plotly.js", _plotly),
        route("/api/state", _state),
        route("/api/claims", _claims),
        route("/api/claims/{id}", _claim),
        route("/api/claims/{id}/figure.svg", _figure),
        route("/api/course", _course),
        route("/api/course/{id}", _course_item),
        route("/api/train/presets", _form),
        route("/api/train", _runs),
        route("/api/train/{run}/events", _run_events),
        route("/api/size/presets", _presets),
        route("/api/size/chinchilla", _chinchilla),
        route("/api/python", _snippet),
        route("/v1/models", _models, v1=True),
        route("/v1/models/{id:path}", _model, v1=True),
    ]
    return [*gets, *posts, Mount("/static", StaticFiles(directory=STATIC))]


async def _not_found(request: Request, error: Exception) -> Response:
    """Respond to an unknown path, or to a method that a path does not accept."""
    status = getattr(error, "status_code", 404)
    path = repr(request.url.path[:100])
    sentence = f"{path} does not accept {request.method}." if status == 405 else f"{path} does not exist."
    return json_response(openai.error(sentence) if request.url.path.startswith("/v1") else {"error": sentence}, status)


# The page


async def _page(studio: Studio, request: Request) -> Response:
    """Return the page. It posts to /api/warm once it is drawn: importing torch earlier would slow down its files."""
    return FileResponse(STATIC / "index.html")


async def _warm(studio: Studio, request: Request) -> Response:
    """Start to import torch, unless it is imported already."""
    await studio.parse_body(request, schema.ApiRequest)
    studio.torch_loader.start()
    return json_response({"torch": studio.torch_loader.state})


async def _plotly(studio: Studio, request: Request) -> Response:
    """Return plotly.js from the installed Python package, without importing the package."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise StudioError(f"plotly is not installed: {install('studio')}.")
    return FileResponse(
        Path(found.origin).parent / "package_data" / "plotly.min.js",
        media_type="text/javascript",
        headers={"cache-control": "max-age=86400"},
    )


async def _state(studio: Studio, request: Request) -> Response:
    ready = studio.torch_loader.state == "ready"
    return json_response(
        {
            "version": __version__,
            "torch": studio.torch_loader.state,
            "models": studio.models.describe(ready),
            "recorded": studio.recorded.index,
            "limits": vars(studio.settings.limits),
        }
    )


# Views


async def _torch_view(name: str, studio: Studio, request: Request) -> Response:
    kind, function = TORCH_VIEWS[name]
    body = await studio.parse_body(request, kind)
    if (recorded := studio.recorded_response(name, request, body)) is not None:
        return recorded
    studio.torch_loader.require()
    return await studio.respond(request, lambda: function(studio.models, body))


async def _config_view(name: str, studio: Studio, request: Request) -> Response:
    kind, function = CONFIG_VIEWS[name]
    body = await studio.parse_body(request, kind)
    ready = studio.torch_loader.state == "ready"
    return await studio.respond(request, lambda: function(studio.models, body, ready))


async def _next(studio: Studio, request: Request) -> Response:
    """Return the next token's distribution as JSON, or all logits if the client accepts tensors."""
    body = await studio.parse_body(request, schema.Next)
    if (recorded := studio.recorded_response("next", request, body)) is not None:
        return recorded
    studio.torch_loader.require()
    binary = MEDIA_TYPE in request.headers.get("accept", "")
    function: Callable[..., Any] = playground.next_logits if binary else playground.next_token
    return await studio.respond(request, lambda: function(studio.models, body))


async def _streamed_view(name: str, studio: Studio, request: Request) -> Any:
    kind, function, is_long = STREAMED_VIEWS[name]
    body = await studio.parse_body(request, kind)
    studio.torch_loader.require()
    studio.models.entry(body.model)  # type: ignore[attr-defined]
    return studio.stream(lambda emit: function(studio.models, body, emit), is_long)


async def _snippet(studio: Studio, request: Request) -> Response:
    return json_response(snippets.snippet(studio.models, dict(request.query_params)))


async def _presets(studio: Studio, request: Request) -> Response:
    return json_response(size.preset_names())


async def _chinchilla(studio: Studio, request: Request) -> Response:
    return json_response(size.chinchilla(schema.ChinchillaQuery.model_validate(dict(request.query_params))))


# Theory


async def _claims(studio: Studio, request: Request) -> Response:
    return await studio.respond(request, theory.list_claims)


async def _claim(studio: Studio, request: Request) -> Response:
    return await studio.respond(request, lambda: theory.describe(request.path_params["id"]))


async def _figure(studio: Studio, request: Request) -> Response:
    claim = theory.find_claim(request.path_params["id"])
    query = schema.FigureQuery.model_validate(dict(request.query_params))
    studio.torch_loader.require()
    svg = await studio.run_job(request, lambda: with_torch_checks(lambda: theory.figure(claim.id, query)))
    return Response(svg, media_type="image/svg+xml")


async def _run_claim(studio: Studio, request: Request) -> Any:
    claim = theory.find_claim(request.path_params["id"])
    body = await studio.parse_body(request, schema.RunClaim)
    theory.knob_values(claim, body.knobs)
    studio.torch_loader.require()
    return studio.stream(lambda emit: theory.run(claim.id, body, emit), is_long=True)


async def _course(studio: Studio, request: Request) -> Response:
    from glassformer.studio.api import course  # mpmath and sympy are not needed before this view is opened

    return await studio.respond(request, course.outline, torch_checks=False)


async def _course_item(studio: Studio, request: Request) -> Response:
    from glassformer.studio.api import course

    return await studio.respond(request, lambda: course.describe(request.path_params["id"]), torch_checks=False)


async def _course_action(studio: Studio, request: Request) -> Response:
    from glassformer.studio.api import course

    body = await studio.parse_body(request, schema.CourseAction)
    is_local = studio.settings.is_local
    act = functools.partial(course.act, request.path_params["id"], body, is_local)
    return await studio.respond(request, act, torch_checks=False)


# Training


async def _form(studio: Studio, request: Request) -> Response:
    studio.torch_loader.require()
    return await studio.respond(request, lambda: training_view.form(studio.training_runs))


async def _runs(studio: Studio, request: Request) -> Response:
    def describe() -> Any:
        return {"runs": [studio.training_runs.describe(run) for run in studio.training_runs.runs()]}

    return await studio.respond(request, describe)


async def _start_run(studio: Studio, request: Request) -> Response:
    body = await studio.parse_body(request, schema.Train)
    studio.torch_loader.require()
    # A run that has been started must be recorded, so this job is not cancelled half-way.
    return await studio.respond(request, lambda: training_view.start(studio.training_runs, body), torch_checks=False)


async def _upload(studio: Studio, request: Request) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "text/plain":
        raise StudioError(f"Content-Type is {kind[:60] or 'missing'}: send a text file as text/plain.")
    data, title = await studio.read_body(request), request.query_params.get("name", "")
    return await studio.respond(request, lambda: studio.training_runs.add_corpus(data, title))


async def _run_action(studio: Studio, request: Request) -> Response:
    run = studio.training_runs.run(request.path_params["run"])
    action = schema.RunAction.model_validate({"action": request.path_params["action"]}).action

    def act() -> Any:
        match action:
            case "resume":
                studio.training_runs.resume(run)
            case "pause":
                studio.training_runs.end(run, "paused")
            case "stop":
                studio.training_runs.end(run, "stopped")
        return studio.training_runs.describe(run)

    return await studio.respond(request, act)


async def _run_events(studio: Studio, request: Request) -> Any:
    run = studio.training_runs.run(request.path_params["run"])
    after = request.headers.get("last-event-id", request.query_params.get("after", "0"))
    query = schema.RunEventsQuery.model_validate({"after": after})
    if studio.streams >= studio.settings.limits.streams:
        raise BusyError("too many event streams are open: close some of them.")
    studio.streams += 1
    return stream_iterator(training_view.follow(studio.training_runs, run, query.after), studio.stream_closed)


# OpenAI-compatible API


async def _models(studio: Studio, request: Request) -> Response:
    return json_response(openai.list_models(studio.models))


async def _model(studio: Studio, request: Request) -> Response:
    return json_response(openai.get_model(studio.models, request.path_params["id"]))


COMPLETIONS = (openai.start_completion, openai.complete, openai.stream)
CHATS = (chat.start, chat.complete, chat.stream)
"""Functions that check a request, answer it whole, and answer it as a stream."""


async def _complete(
    kind: type[schema.ApiRequest], functions: tuple[Callable[..., Any], ...], studio: Studio, request: Request
) -> Any:
    body: Any = await studio.parse_body(request, kind)
    start, whole, stream = functions
    studio.models.entry(body.model)
    await studio.wait_for_torch()
    if not body.stream:
        return await studio.respond(request, lambda: whole(studio.models, body), torch_checks=False)
    # An invalid prompt is an error response, not an event of the stream.
    await studio.run_job(request, lambda: start(studio.models, body))
    return studio.stream(lambda emit: stream(studio.models, body, emit), is_long=False, v1=True)


async def _embed(studio: Studio, request: Request) -> Response:
    body = await studio.parse_body(request, schema.EmbeddingRequest)
    studio.models.entry(body.model)
    await studio.wait_for_torch()
    return await studio.respond(request, lambda: embeddings.embed(studio.models, body))
