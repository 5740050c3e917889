"""`/v1/chat/completions` in OpenAI's format, whole or streamed.

Messages are rendered by the chat template of the model, with the same code as `glass chat` and training. A message
cannot contain special tokens. If the context is too short, the oldest turns are left out, and the response has a field
`dropped_messages` that counts them.

`tools` are written by the template, and calls of the model become `tool_calls` if the template writes calls as JSON
(`chat.tools`); otherwise they stay in the text. With `tool_choice="none"` the model is not shown the tools.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from glassformer.studio.api.playground import Step
from glassformer.studio.errors import StudioError
from glassformer.studio.events import Emit
from glassformer.studio.models import LoadedModel, ModelStore
from glassformer.studio.openai import TextGeneration, read_seed, read_stops, usage
from glassformer.studio.schema import ChatRequest
from glassformer.studio.settings import LIMITS

if TYPE_CHECKING:
    from glassformer.chat.render import Renderer
    from glassformer.chat.tools import CallFormat, CallPieces


def renderer_of(loaded: LoadedModel) -> "Renderer":
    """Return the renderer of a model; one sentence if it has no chat template."""
    from glassformer.chat.render import load_renderer

    found: Renderer | None = loaded.cached("renderer", lambda: load_renderer(loaded.path))
    if found is None:
        raise StudioError(
            f"{loaded.name} has no chat template, so it is a model that continues text: use /v1/completions."
        )
    return found


@dataclass
class ChatCompletion:
    """One request while it is answered: `n` texts for one prompt."""

    request: ChatRequest
    generations: list[TextGeneration]
    dropped: int
    """Messages that did not fit the context."""
    head: dict[str, Any]
    format: "CallFormat | None" = None
    """How the template writes calls of tools; None if there are no tools, or if that is not known."""
    tools: Sequence[str] = ()
    """The names of the tools."""

    def pieces(self, generation: TextGeneration) -> "tuple[Iterator[str], CallPieces | None]":
        """Return the text of an answer in pieces, and where its calls will be once they have been read."""
        if self.format is None:
            return generation.pieces(), None
        from glassformer.chat.tools import CallPieces

        growing = CallPieces(self.format, self.tools)

        def pieces() -> Iterator[str]:
            for piece in generation.pieces():
                yield growing.add(piece)
            yield growing.end()

        return (piece for piece in pieces() if piece), growing

    def usage(self) -> dict[str, int]:
        return usage(len(self.generations[0].prompt), sum(len(one.new) for one in self.generations))

    def logprobs(self, generation: TextGeneration) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens since the last call, if they were requested."""
        if not self.request.logprobs:
            return None
        count = self.request.top_logprobs or 0
        return {"content": [_token(generation.loaded, step, count) for step in generation.take_steps()]}

    def extra(self) -> dict[str, Any]:
        return {"dropped_messages": self.dropped} if self.dropped else {}


def start(models: ModelStore, request: ChatRequest) -> ChatCompletion:
    """Render and check the messages, before anything is generated."""
    from glassformer.chat.formats import read_messages
    from glassformer.chat.session import fit
    from glassformer.chat.tools import call_format, names, read_tools

    loaded = models.get(request.model)
    renderer, messages = renderer_of(loaded), read_messages(request.messages, "messages", answers=False)
    wanted = request.max_completion_tokens or request.max_tokens
    _check_tool_choice(request)
    tools = read_tools(request.tools or [])
    shown = None if request.tool_choice == "none" or not tools else tools
    prompt, dropped = fit(renderer, messages, loaded.config.max_len, wanted, shown)
    format = None if shown is None else call_format(renderer, shown)
    marks = "" if format is None else format.opening + format.closing
    keeps = any(token in marks for token in renderer.special)
    seed = read_seed(request.seed)
    generations = [
        TextGeneration(
            loaded,
            loaded.check_ids(prompt),
            wanted or LIMITS.new_tokens,
            1.0 if request.temperature is None else request.temperature,
            1.0 if request.top_p is None else request.top_p,
            (seed + number) % 2**32,
            read_stops(request.stop),
            tuple(renderer.ends),
            bool(request.logprobs),
            keeps,
        )
        for number in range(request.n or 1)
    ]
    head = {"id": f"chatcmpl-{uuid.uuid4().hex[:24]}", "created": int(time.time()), "model": request.model}
    return ChatCompletion(request, generations, dropped, head, format, names(tools))


def _check_tool_choice(request: ChatRequest) -> None:
    """Refuse what would force or forbid calls: the model decides, by what the template says about the tools."""
    if request.tool_choice not in (None, "none", "auto"):
        raise StudioError(f"tool_choice={request.tool_choice!r} is not supported: use 'auto' or 'none'.")
    if request.parallel_tool_calls is False:
        raise StudioError("parallel_tool_calls=False is not supported: leave it out, and use the first call.")


def complete(models: ModelStore, request: ChatRequest) -> dict[str, Any]:
    """Return the whole response at once."""
    answering = start(models, request)
    choices = []
    for index, generation in enumerate(answering.generations):
        pieces, growing = answering.pieces(generation)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(pieces), "refusal": None}
        logprobs, finish = answering.logprobs(generation), generation.finish
        if growing is not None and growing.calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = [call.to_openai() for call in growing.calls]
            finish = _finish(finish)
        choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish})
    head = {**answering.head, "object": "chat.completion"}
    return {**head, "choices": choices, "usage": answering.usage(), **answering.extra()}


def stream(models: ModelStore, request: ChatRequest, emit: Emit) -> None:
    """Emit the response in chunks, then [DONE]."""
    answering = start(models, request)
    head = {**answering.head, "object": "chat.completion.chunk"}
    with_usage = bool((request.stream_options or {}).get("include_usage"))
    null = {"usage": None} if with_usage else {}
    for choice in _choices(answering):
        emit(None, {**head, "choices": [choice], **null, **answering.extra()})
    if with_usage:
        emit(None, {**head, "choices": [], "usage": answering.usage()})
    emit(None, b"[DONE]")


def _choices(answering: ChatCompletion) -> Iterator[dict[str, Any]]:
    """Yield the parts of each text: its role, its pieces, and why it ended."""
    for index, generation in enumerate(answering.generations):

        def choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            logprobs = answering.logprobs(generation) if delta.get("content") or finish else None  # noqa: B023
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}  # noqa: B023

        yield choice({"role": "assistant", "content": ""})
        pieces, growing = answering.pieces(generation)
        for piece in pieces:
            yield choice({"content": piece})
        calls = [] if growing is None else growing.calls
        for number, call in enumerate(calls):
            yield choice({"tool_calls": [{"index": number, **call.to_openai()}]})
        yield choice({}, _finish(generation.finish) if calls else generation.finish)


def _finish(reason: str) -> str:
    """Return why an answer with calls ended."""
    return "tool_calls" if reason == "stop" else reason


def _token(loaded: LoadedModel, step: Step, count: int) -> dict[str, Any]:
    logprobs = step.logits.double().log_softmax(-1)
    best = logprobs.topk(min(count, len(logprobs)))
    top = [_entry(loaded, i, p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return {**_entry(loaded, step.id, float(logprobs[step.id])), "top_logprobs": top}


def _entry(loaded: LoadedModel, token: int, logprob: float) -> dict[str, Any]:
    text = loaded.token_text(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": _bytes(loaded, token, text)}


def _bytes(loaded: LoadedModel, token: int, text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a token, also of one that is a part of a character; None if they are not known."""
    if text != f"#{token}":
        return list(text.encode())
    from glassformer.weights.tokenizer.splits import byte_signs

    piece = None if loaded.tokenizer is None else loaded.tokenizer.id_to_token(token)
    signs = {sign: byte for byte, sign in enumerate(byte_signs())}
    if piece is None or not all(sign in signs for sign in piece):
        return None
    return [signs[sign] for sign in piece]
