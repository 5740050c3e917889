"""The application: routes to the views, errors to sentences, the page and its files. Imports no torch."""

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
from glassformer.extras import install
from glassformer.studio import openai, schema
from glassformer.studio.answers import Studio, answered, json_response
from glassformer.studio.api import anatomy, cell, doctor, heads, lines, playground, positions, size, stream, theory
from glassformer.studio.api import train as training_view
from glassformer.studio.errors import BusyError, StudioError
from glassformer.studio.events import EventStream
from glassformer.studio.guard import Guard
from glassformer.studio.settings import Settings
from glassformer.studio.wire import MEDIA_TYPE

STATIC = Path(__file__).parent / "static"

POSTED: dict[str, tuple[type[schema.Asked], Callable[..., Any]]] = {
    "tokens": (schema.Tokens, playground.tokens),
    "vocabulary": (schema.AboutModel, playground.vocabulary),
    "beam": (schema.Beam, playground.beam),
    "tensor": (schema.OneTensor, anatomy.tensor),
    "cell": (schema.Cell, cell.cell),
    "patterns": (schema.Patterns, heads.patterns),
    "heads": (schema.HeadScores, heads.scores),
    "ablate": (schema.Ablate, heads.ablate),
    "lens": (schema.Lens, stream.lens),
    "attribution": (schema.Attribution, stream.attribution),
    "depth": (schema.AboutText, stream.depth),
    "positions": (schema.Positions, positions.positions),
}
"""Views that take a body, need torch, and answer at once."""
LIGHT: dict[str, tuple[type[schema.Asked], Callable[..., Any]]] = {
    "anatomy": (schema.AboutModel, anatomy.anatomy),
    "size": (schema.Size, size.sheet),
}
"""Views that can do without torch; they are told whether it is there."""
STREAMED: dict[str, tuple[type[schema.Asked], Callable[..., Any], bool]] = {
    "generate": (schema.Generate, playground.generate, False),
    "patch": (schema.Patch, stream.patch, True),
    "doctor": (schema.Doctor, doctor.examine, True),
}
"""Views that answer with events; the last says whether they belong to the long queue."""


def create_app(settings: Settings | None = None) -> Starlette:
    """The studio as an ASGI application."""
    studio = Studio(settings or Settings())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        studio.trainings.recover()
        try:
            yield
        finally:
            studio.close()

    app = Starlette(
        routes=_routes(studio),
        middleware=[Middleware(Guard, settings=studio.settings)],
        lifespan=lifespan,
        exception_handlers={404: _missing, 405: _missing},
    )
    app.state.studio = studio
    return app


def _routes(studio: Studio) -> list[Route | Mount]:
    def route(path: str, handler: Any, method: str = "GET", v1: bool = False) -> Route:
        return Route(path, answered(functools.partial(handler, studio), v1), methods=[method])

    posts = [
        *(route(f"/api/{name}", functools.partial(_posted, name), "POST") for name in POSTED),
        *(route(f"/api/{name}", functools.partial(_light, name), "POST") for name in LIGHT),
        *(route(f"/api/{name}", functools.partial(_streamed, name), "POST") for name in STREAMED),
        route("/api/next", _next, "POST"),
        route("/api/warm", _warm, "POST"),
        route("/api/claims/{id}/run", _run_claim, "POST"),
        route("/api/train/upload", _upload, "POST"),
        route("/api/train/{run}/{action}", _act, "POST"),
        route("/api/train", _start_run, "POST"),
        route("/v1/completions", _complete, "POST", v1=True),
    ]
    gets = [
        route("/", _page),
        route("/static/plotly.js", _plotly),
        route("/api/state", _state),
        route("/api/claims", _claims),
        route("/api/claims/{id}", _claim),
        route("/api/claims/{id}/figure.svg", _figure),
        route("/api/train/presets", _form),
        route("/api/train", _runs),
        route("/api/train/{run}/events", _follow),
        route("/api/size/presets", _presets),
        route("/api/size/chinchilla", _chinchilla),
        route("/api/python", _lines),
        route("/v1/models", _models, v1=True),
        route("/v1/models/{id:path}", _model, v1=True),
    ]
    return [*gets, *posts, Mount("/static", StaticFiles(directory=STATIC))]


async def _missing(request: Request, error: Exception) -> Response:
    """A path that is not there, or a method that a path does not know."""
    status = getattr(error, "status_code", 404)
    what = "does not take" if status == 405 else "is not an address of the studio for"
    told = f"{request.url.path[:100]!r} {what} {request.method}."
    body = openai.error(told) if request.url.path.startswith("/v1") else {"error": told}
    return json_response(body, status)


# the page


async def _page(studio: Studio, request: Request) -> Response:
    """The page. It asks for torch (`warm`) once it is drawn: an import beside it would slow every file it loads."""
    return FileResponse(STATIC / "index.html")


async def _warm(studio: Studio, request: Request) -> Response:
    """Begin to import torch, if nobody has."""
    await studio.read(request, schema.Asked)
    studio.engine.start()
    return json_response({"torch": studio.engine.state})


async def _plotly(studio: Studio, request: Request) -> Response:
    """plotly.js out of the installed package, which is not imported for it."""
    found = importlib.util.find_spec("plotly")
    if found is None or found.origin is None:
        raise StudioError(f"plotly is not installed: {install('studio')}.")
    return FileResponse(
        Path(found.origin).parent / "package_data" / "plotly.min.js",
        media_type="text/javascript",
        headers={"cache-control": "max-age=86400"},
    )


async def _state(studio: Studio, request: Request) -> Response:
    ready = studio.engine.state == "ready"
    return json_response(
        {
            "version": __version__,
            "torch": studio.engine.state,
            "models": studio.shelf.describe(ready),
            "canned": studio.canned.index,
            "limits": vars(studio.settings.limits),
        }
    )


# views


async def _posted(name: str, studio: Studio, request: Request) -> Response:
    kind, function = POSTED[name]
    asked = await studio.read(request, kind)
    if (held := studio.from_the_can(name, request, asked)) is not None:
        return held
    studio.engine.require()
    return await studio.answer(request, lambda ticket: function(studio.shelf, asked))


async def _light(name: str, studio: Studio, request: Request) -> Response:
    kind, function = LIGHT[name]
    asked = await studio.read(request, kind)
    ready = studio.engine.state == "ready"
    return await studio.answer(request, lambda ticket: function(studio.shelf, asked, ready))


async def _next(studio: Studio, request: Request) -> Response:
    """JSON, or all logits when the client accepts tensors."""
    asked = await studio.read(request, schema.Next)
    if (held := studio.from_the_can("next", request, asked)) is not None:
        return held
    studio.engine.require()
    binary = MEDIA_TYPE in request.headers.get("accept", "")
    function = playground.next_logits if binary else playground.next_token
    return await studio.answer(request, lambda ticket: function(studio.shelf, asked))


async def _streamed(name: str, studio: Studio, request: Request) -> Any:
    kind, function, is_long = STREAMED[name]
    asked = await studio.read(request, kind)
    studio.engine.require()
    studio.shelf.entry(asked.model)  # type: ignore[attr-defined]
    return studio.stream(lambda ticket, emit: function(studio.shelf, asked, ticket, emit), is_long)


async def _lines(studio: Studio, request: Request) -> Response:
    return json_response(lines.lines(studio.shelf, dict(request.query_params)))


async def _presets(studio: Studio, request: Request) -> Response:
    return json_response(size.preset_names())


async def _chinchilla(studio: Studio, request: Request) -> Response:
    return json_response(size.chinchilla(dict(request.query_params)))


# theory


async def _claims(studio: Studio, request: Request) -> Response:
    return await studio.answer(request, lambda ticket: theory.listing())


async def _claim(studio: Studio, request: Request) -> Response:
    return await studio.answer(request, lambda ticket: theory.words(request.path_params["id"]))


async def _figure(studio: Studio, request: Request) -> Response:
    claim, given = request.path_params["id"], dict(request.query_params)
    theory.known(claim)
    studio.engine.require()
    drawn = await studio.work(request, lambda ticket: theory.figure(claim, given))
    return Response(drawn, media_type="image/svg+xml")


async def _run_claim(studio: Studio, request: Request) -> Any:
    claim = theory.known(request.path_params["id"])
    asked = await studio.read(request, schema.RunClaim)
    theory.knobs_of(claim, asked.knobs)
    studio.engine.require()
    return studio.stream(lambda ticket, emit: theory.run(claim.id, asked, ticket, emit), True)


# training


async def _form(studio: Studio, request: Request) -> Response:
    studio.engine.require()
    return await studio.answer(request, lambda ticket: training_view.form(studio.trainings))


async def _runs(studio: Studio, request: Request) -> Response:
    def listed(ticket: Any) -> Any:
        return {"runs": [studio.trainings.describe(run) for run in studio.trainings.runs()]}

    return await studio.answer(request, listed)


async def _start_run(studio: Studio, request: Request) -> Response:
    asked = await studio.read(request, schema.Train)
    studio.engine.require()
    return await studio.answer(request, lambda ticket: training_view.start(studio.trainings, asked))


async def _upload(studio: Studio, request: Request) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "text/plain":
        raise StudioError(f"an upload is text/plain, not {kind[:60] or 'of no type'}: send a text file.")
    data, title = await studio.body(request), request.query_params.get("name", "")
    return await studio.answer(request, lambda ticket: studio.trainings.keep_corpus(data, title))


async def _act(studio: Studio, request: Request) -> Response:
    run, action = studio.trainings.run(request.path_params["run"]), request.path_params["action"]
    wanted = {"pause": "paused", "stop": "stopped"}

    def act(ticket: Any) -> Any:
        if action == "resume":
            studio.trainings.resume(run)
        elif action in wanted:
            studio.trainings.end(run, wanted[action])
        else:
            raise StudioError(f"a run can be told pause, resume or stop, not {action[:60]!r}.")
        return studio.trainings.describe(run)

    return await studio.answer(request, act)


async def _follow(studio: Studio, request: Request) -> Any:
    run = studio.trainings.run(request.path_params["run"])
    after = request.headers.get("last-event-id", request.query_params.get("after", "0"))
    if not (after.isascii() and after.isdigit() and len(after) < 16):
        raise StudioError(f"Last-Event-ID {after[:60]!r} must be the id of an event: a whole number.")
    if studio.streams >= studio.settings.limits.streams:
        raise BusyError("too many streams are open: close some.")
    studio.streams += 1
    return EventStream(training_view.follow(studio.trainings, run, int(after)), studio.stream_closed)


# OpenAI's protocol


async def _models(studio: Studio, request: Request) -> Response:
    return json_response(openai.models(studio.shelf))


async def _model(studio: Studio, request: Request) -> Response:
    return json_response(openai.model(studio.shelf, request.path_params["id"]))


async def _complete(studio: Studio, request: Request) -> Any:
    asked = await studio.read(request, schema.Completion)
    studio.shelf.entry(asked.model)
    await studio.ready()
    if not asked.stream:
        return await studio.answer(request, lambda ticket: openai.complete(studio.shelf, asked))
    # what is wrong with the prompt is told as an error, not in the stream
    await studio.work(request, lambda ticket: openai.open_answer(studio.shelf, asked))
    return studio.stream(lambda ticket, emit: openai.stream(studio.shelf, asked, ticket, emit), False, v1=True)
