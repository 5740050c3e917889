"""OpenAI's completions protocol, so that existing clients can talk to a model trained here.

`/v1/models`, `/v1/models/ID`, `/v1/completions` (whole or streamed). Temperature 0 is greedy, and its text is that of
`gf.generate`. Errors have OpenAI's shape.
"""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from glassformer.studio.api.playground import start_feed, steps
from glassformer.studio.errors import StudioError
from glassformer.studio.events import Emit
from glassformer.studio.jobs import Ticket
from glassformer.studio.schema import AboutText, Completion
from glassformer.studio.shelf import Loaded, Shelf

STARTED = int(time.time())


def error(sentence: str, param: str | None = None, code: str | None = None, kind: str = "invalid_request_error") -> Any:
    """An error body."""
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code}}


def models(shelf: Shelf) -> dict[str, Any]:
    return {"object": "list", "data": [_model(name) for name in shelf.entries()]}


def model(shelf: Shelf, name: str) -> dict[str, Any]:
    return _model(shelf.entry(name).name)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "glassformer"}


@dataclass
class Answer:
    """One completion on its way."""

    loaded: Loaded
    asked: Completion
    prompt: list[int]
    new: list[int] = field(default_factory=list)
    finish: str = "length"
    text: str = ""
    """All that may be shown: what could begin a stop text is held back."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stops(self) -> list[str]:
        stop = self.asked.stop
        return [] if stop is None else [stop] if isinstance(stop, str) else [s for s in stop if s]

    def pieces(self) -> Iterator[str]:
        """The text as it grows; joined, it is the whole."""
        from glassformer.generation import Sampling
        from glassformer.generation.loop import read_stop

        asked, model = self.asked, self.loaded.model
        temperature = 1.0 if asked.temperature is None else asked.temperature
        sampling = Sampling(temperature, None, 1.0 if asked.top_p is None else asked.top_p)
        room = (model.config.max_len or 10**9) - len(self.prompt)
        new = max(1, min(16 if asked.max_tokens is None else asked.max_tokens, room))
        about = AboutText(model=asked.model, ids=self.prompt)
        seed = uuid.uuid4().int % 2**32 if asked.seed is None else asked.seed % 2**32
        if asked.echo:
            yield self.loaded.decode(self.prompt)
        for step in steps(start_feed(self.loaded, about, new, True), new, sampling, seed, read_stop(model, None)):
            self.new.append(step.id)
            if asked.logprobs is not None:
                self.logprobs.append(_logprobs(self.loaded, step, asked.logprobs))
            yield from self._more(self.loaded.decode(self._spoken()), last=False)
            if self.finish == "stop":
                return
        if self.new and self.new[-1] in model.config.special.eos:
            self.finish = "stop"
        yield from self._more(self.loaded.decode(self._spoken()), last=True)

    def _spoken(self) -> list[int]:
        """Without the end of text, which is a sign and no word."""
        eos = self.loaded.config.special.eos
        return self.new[:-1] if self.new and self.new[-1] in eos else self.new

    def _more(self, text: str, last: bool) -> Iterator[str]:
        found = [at for at in (text.find(stop) for stop in self.stops) if at >= 0]
        if found:
            text, self.finish = text[: min(found)], "stop"
        elif not last:
            waiting = len(text) - len(text.rstrip("\ufffd"))
            begun = (n for s in self.stops for n in range(len(s) - 1, 0, -1) if text.endswith(s[:n]))
            text = text[: len(text) - max(waiting, max(begun, default=0))]
        if text.startswith(self.text) and len(text) > len(self.text):
            yield text[len(self.text) :]
            self.text = text

    def usage(self) -> dict[str, int]:
        read, said = len(self.prompt), len(self.new)
        return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}

    def choice(self, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": self._told(), "finish_reason": finish}

    def _told(self) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        told, self.logprobs = self.logprobs, []
        return {
            "tokens": [row["token"] for row in told],
            "token_logprobs": [row["logprob"] for row in told],
            "top_logprobs": [row["top"] for row in told],
            "text_offset": [0 for _ in told],
        }


def _logprobs(loaded: Loaded, step: Any, count: int) -> dict[str, Any]:
    own = step.logits.double().log_softmax(-1)
    best = own.topk(min(max(count, 1), len(own)))
    top = {loaded.say(i): p for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)}
    return {"token": loaded.say(step.id), "logprob": float(own[step.id]), "top": top if count else None}


def open_answer(shelf: Shelf, asked: Completion) -> Answer:
    """The prompt read and checked, before anything is said."""
    loaded = shelf.get(asked.model)
    prompt = asked.prompt[0] if isinstance(asked.prompt, list) and isinstance(asked.prompt[0], str) else asked.prompt
    if isinstance(prompt, str):
        if not prompt:
            raise StudioError("the prompt is empty: a model needs at least one token to go on from.")
        ids = loaded.encode(prompt)
    else:
        ids = [int(token) for token in prompt]
    return Answer(loaded, asked, loaded.checked(ids))


def complete(shelf: Shelf, asked: Completion) -> dict[str, Any]:
    """The whole answer at once."""
    answer = open_answer(shelf, asked)
    text = "".join(answer.pieces())
    return {**_head(asked), "choices": [answer.choice(text, answer.finish)], "usage": answer.usage()}


def stream(shelf: Shelf, asked: Completion, ticket: Ticket, emit: Emit) -> None:
    """Chunks as they come, then [DONE]. Events have no name, as in OpenAI's stream."""
    answer, head = open_answer(shelf, asked), _head(asked)
    for text in answer.pieces():
        emit(None, {**head, "choices": [answer.choice(text, None)]})
    emit(None, {**head, "choices": [answer.choice("", answer.finish)]})
    if (asked.stream_options or {}).get("include_usage"):
        emit(None, {**head, "choices": [], "usage": answer.usage()})
    emit(None, b"[DONE]")


def _head(asked: Completion) -> dict[str, Any]:
    made = {"id": f"cmpl-{uuid.uuid4().hex[:24]}", "object": "text_completion", "created": int(time.time())}
    return {**made, "model": asked.model}
