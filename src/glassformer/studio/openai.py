"""An OpenAI-compatible completions API, so that existing clients can use a model of the studio.

`/v1/models`, `/v1/models/ID` and `/v1/completions` (whole or streamed); see also `chat` and `embeddings`. Temperature 0
is greedy decoding and returns the same text as `gf.generate`. Errors have OpenAI's format.
"""

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from glassformer.config import Seq2SeqConfig
from glassformer.studio.api.playground import Step, steps
from glassformer.studio.errors import StudioError
from glassformer.studio.events import Emit
from glassformer.studio.jobs import check_cancelled
from glassformer.studio.models import LoadedModel, ModelStore
from glassformer.studio.schema import CompletionRequest

STARTED = int(time.time())


def error(sentence: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error") -> Any:
    """Return an error body in OpenAI's format."""
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code}}


def list_models(models: ModelStore) -> dict[str, Any]:
    return {"object": "list", "data": [_model_object(name) for name in models.entries()]}


def get_model(models: ModelStore, name: str) -> dict[str, Any]:
    return _model_object(models.entry(name).name)


def _model_object(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "glassformer"}


@dataclass
class TextGeneration:
    """One text while it is generated: by `/v1/completions`, `/v1/chat/completions` and the chat panel."""

    loaded: LoadedModel
    prompt: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[str, ...] = ()
    """Texts that end it; they are not part of it."""
    ends: tuple[int, ...] = ()
    """Tokens that end it, in addition to those of the config; they are not part of it."""
    keep_steps: bool = False
    """Keep the steps, with their logits, until `take_steps` is called."""
    keep_special: bool = False
    """Write special tokens as text, too."""
    new: list[int] = field(default_factory=list)
    finish: str = "length"
    waiting: list[Step] = field(default_factory=list)

    def pieces(self) -> Iterator[str]:
        """Generate the text piece by piece; joined, the pieces are the whole text."""
        from glassformer.generation.text import TextPieces

        ends, growing = {*self.loaded.config.special.eos, *self.ends}, TextPieces(self.stops)
        for token in self._tokens(ends):
            self.new.append(token)
            if token in ends:
                self.finish = "stop"
                if self.keep_steps:
                    self.waiting.pop()
                break
            piece = growing.add(self.decode(self.new))
            if piece:
                yield piece
            if growing.stopped:
                self.finish = "stop"
                return
        visible = self.new[:-1] if self.finish == "stop" else self.new
        if rest := growing.add(self.decode(visible), last=True):
            yield rest

    def _tokens(self, ends: set[int]) -> Iterator[int]:
        """Generate the tokens one by one; with `keep_steps`, append each step to those that wait."""
        from glassformer.generation import Sampling
        from glassformer.generation.engine import make_state
        from glassformer.generation.loop import Steps
        from glassformer.generation.request import read_request
        from glassformer.generation.state import without_gradients

        model: Any = self.loaded.model  # read_request refuses an encoder
        is_decoder = not isinstance(model.config, Seq2SeqConfig)
        room = (model.config.max_len or 10**9) - (len(self.prompt) if is_decoder else 1)
        limit, sampling = max(1, min(self.max_new_tokens, room)), Sampling(self.temperature, None, self.top_p)
        stops = [[end] for end in sorted(ends)]
        request = read_request(model, [self.prompt], limit, sampling, seed=self.seed, stop=stops)
        with self.loaded.kept_cache() if is_decoder else contextlib.nullcontext() as kept:
            with without_gradients():
                state, engine = make_state(model, request) if kept is None else kept.state(request)
            if self.keep_steps:
                for step in steps(state, limit, sampling, self.seed, stops):
                    self.waiting.append(step)
                    yield step.id
                return
            running = Steps(state, request, engine)
            check_cancelled()
            for (token,) in running:
                assert token is not None  # the only sequence has not ended
                yield token
                check_cancelled()

    def decode(self, ids: list[int]) -> str:
        if self.keep_special and self.loaded.tokenizer is not None:
            return str(self.loaded.tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""
        return self.loaded.decode(ids)

    def take_steps(self) -> list[Step]:
        """Return the steps since the last call; the token that ended the text is none of them."""
        taken, self.waiting = self.waiting, []
        return taken

    def usage(self) -> dict[str, int]:
        return usage(len(self.prompt), len(self.new))


def usage(prompt: int, new: int) -> dict[str, int]:
    """Return the token counts of a response in OpenAI's format."""
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def read_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop texts of a request."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(text for text in stop if text)


def read_seed(seed: int | None) -> int:
    """Return the seed of a request; a random one if it names none."""
    return uuid.uuid4().int % 2**32 if seed is None else seed % 2**32


@dataclass
class Completion:
    """One completion of `/v1/completions`."""

    request: CompletionRequest
    generation: TextGeneration

    def pieces(self) -> Iterator[str]:
        if self.request.echo:
            yield self.generation.loaded.decode(self.generation.prompt)
        yield from self.generation.pieces()

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": self._take_logprobs(), "finish_reason": finish}

    def _take_logprobs(self) -> dict[str, Any] | None:
        count, loaded = self.request.logprobs, self.generation.loaded
        if count is None:
            return None
        rows = [_logprobs(loaded, step, count) for step in self.generation.take_steps()]
        return {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [row["top"] for row in rows],
            "text_offset": [0 for _ in rows],
        }


def _logprobs(loaded: LoadedModel, step: Any, count: int) -> dict[str, Any]:
    logprobs = step.logits.double().log_softmax(-1)
    best = logprobs.topk(min(max(count, 1), len(logprobs)))
    top = {loaded.token_text(i): p for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
    return {"token": loaded.token_text(step.id), "logprob": float(logprobs[step.id]), "top": top if count else None}


def start_completion(models: ModelStore, request: CompletionRequest) -> Completion:
    """Read and check the prompt, before anything is generated."""
    loaded = models.get(request.model)
    prompt = (
        request.prompt[0] if isinstance(request.prompt, list) and isinstance(request.prompt[0], str) else request.prompt
    )
    if isinstance(prompt, str):
        if not prompt:
            raise StudioError("the prompt is empty: give at least one token.")
        ids = loaded.encode(prompt)
    else:
        ids = [int(token) for token in prompt]
    generation = TextGeneration(
        loaded,
        loaded.check_ids(ids),
        16 if request.max_tokens is None else request.max_tokens,
        1.0 if request.temperature is None else request.temperature,
        1.0 if request.top_p is None else request.top_p,
        read_seed(request.seed),
        read_stops(request.stop),
        keep_steps=request.logprobs is not None,
    )
    return Completion(request, generation)


def complete(models: ModelStore, request: CompletionRequest) -> dict[str, Any]:
    """Return the whole completion at once."""
    completion = start_completion(models, request)
    text = "".join(completion.pieces())
    choice = completion.choice(text, completion.generation.finish)
    return {**_head(request), "choices": [choice], "usage": completion.generation.usage()}


def stream(models: ModelStore, request: CompletionRequest, emit: Emit) -> None:
    """Emit the completion in chunks, then [DONE]. Events have no name, as in OpenAI's API."""
    completion, head = start_completion(models, request), _head(request)
    for text in completion.pieces():
        emit(None, {**head, "choices": [completion.choice(text, None)]})
    emit(None, {**head, "choices": [completion.choice("", completion.generation.finish)]})
    if (request.stream_options or {}).get("include_usage"):
        emit(None, {**head, "choices": [], "usage": completion.generation.usage()})
    emit(None, b"[DONE]")


def _head(request: CompletionRequest) -> dict[str, Any]:
    head = {"id": f"cmpl-{uuid.uuid4().hex[:24]}", "object": "text_completion", "created": int(time.time())}
    return {**head, "model": request.model}
