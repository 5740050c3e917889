"""An OpenAI-compatible completions API, so that existing clients can use a model of the studio.

`/v1/models`, `/v1/models/ID` and `/v1/completions` (whole or streamed). Temperature 0 is greedy decoding and returns
the same text as `gf.generate`. Errors have OpenAI's format.
"""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from glassformer.studio.api.playground import start_feed, steps
from glassformer.studio.errors import StudioError
from glassformer.studio.events import Emit
from glassformer.studio.models import LoadedModel, ModelStore
from glassformer.studio.schema import CompletionRequest, TextRequest

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
class Completion:
    """One completion while it is generated."""

    loaded: LoadedModel
    request: CompletionRequest
    prompt: list[int]
    new: list[int] = field(default_factory=list)
    finish: str = "length"
    text: str = ""
    """Text that is certain: an ending that may be the start of a stop sequence is held back."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stops(self) -> list[str]:
        stop = self.request.stop
        return [] if stop is None else [stop] if isinstance(stop, str) else [s for s in stop if s]

    def pieces(self) -> Iterator[str]:
        """Generate the text piece by piece; joined, the pieces are the whole text."""
        from glassformer.generation import Sampling
        from glassformer.generation.request import read_stop

        request, model = self.request, self.loaded.model
        temperature = 1.0 if request.temperature is None else request.temperature
        sampling = Sampling(temperature, None, 1.0 if request.top_p is None else request.top_p)
        available = (model.config.max_len or 10**9) - len(self.prompt)
        new = max(1, min(16 if request.max_tokens is None else request.max_tokens, available))
        inputs = TextRequest(model=request.model, ids=self.prompt)
        seed = uuid.uuid4().int % 2**32 if request.seed is None else request.seed % 2**32
        if request.echo:
            yield self.loaded.decode(self.prompt)
        for step in steps(start_feed(self.loaded, inputs, new, True), new, sampling, seed, read_stop(model, None)):
            self.new.append(step.id)
            if request.logprobs is not None:
                self.logprobs.append(_logprobs(self.loaded, step, request.logprobs))
            yield from self._new_text(self.loaded.decode(self._visible_tokens()), last=False)
            if self.finish == "stop":
                return
        if self.new and self.new[-1] in model.config.special.eos:
            self.finish = "stop"
        yield from self._new_text(self.loaded.decode(self._visible_tokens()), last=True)

    def _visible_tokens(self) -> list[int]:
        """Return the generated tokens without the end-of-text token."""
        eos = self.loaded.config.special.eos
        return self.new[:-1] if self.new and self.new[-1] in eos else self.new

    def _new_text(self, text: str, last: bool) -> Iterator[str]:
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            text, self.finish = text[: min(found)], "stop"
        elif not last:
            incomplete = len(text) - len(text.rstrip("\ufffd"))
            partial = (n for s in self.stops for n in range(len(s) - 1, 0, -1) if text.endswith(s[:n]))
            text = text[: len(text) - max(incomplete, max(partial, default=0))]
        if text.startswith(self.text) and len(text) > len(self.text):
            yield text[len(self.text) :]
            self.text = text

    def usage(self) -> dict[str, int]:
        prompt, new = len(self.prompt), len(self.new)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": self._take_logprobs(), "finish_reason": finish}

    def _take_logprobs(self) -> dict[str, Any] | None:
        if self.request.logprobs is None:
            return None
        rows, self.logprobs = self.logprobs, []
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
    return Completion(loaded, request, loaded.check_ids(ids))


def complete(models: ModelStore, request: CompletionRequest) -> dict[str, Any]:
    """Return the whole completion at once."""
    completion = start_completion(models, request)
    text = "".join(completion.pieces())
    choice = completion.choice(text, completion.finish)
    return {**_head(request), "choices": [choice], "usage": completion.usage()}


def stream(models: ModelStore, request: CompletionRequest, emit: Emit) -> None:
    """Emit the completion in chunks, then [DONE]. Events have no name, as in OpenAI's API."""
    completion, head = start_completion(models, request), _head(request)
    for text in completion.pieces():
        emit(None, {**head, "choices": [completion.choice(text, None)]})
    emit(None, {**head, "choices": [completion.choice("", completion.finish)]})
    if (request.stream_options or {}).get("include_usage"):
        emit(None, {**head, "choices": [], "usage": completion.usage()})
    emit(None, b"[DONE]")


def _head(request: CompletionRequest) -> dict[str, Any]:
    head = {"id": f"cmpl-{uuid.uuid4().hex[:24]}", "object": "text_completion", "created": int(time.time())}
    return {**head, "model": request.model}
