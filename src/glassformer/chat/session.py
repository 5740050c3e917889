"""Chatting with a model: the messages so far, answers in pieces, and a KV cache that is kept between turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glassformer.chat.errors import ChatError
from glassformer.chat.formats import Message
from glassformer.chat.render import Renderer
from glassformer.errors import plural
from glassformer.generation import Sampling
from glassformer.generation.kept import KeptCache
from glassformer.generation.loop import Steps
from glassformer.generation.request import Engine, Precision, encode_text, read_request
from glassformer.generation.state import without_gradients
from glassformer.generation.text import TextPieces
from glassformer.model import DecoderLM, Model

NEW_TOKENS = 8192
"""Largest length of an answer that is not limited otherwise: its cache may be allocated at once."""
PLAIN_TOKENS = 64
"""Tokens per turn of a model without a chat template, which has nothing that ends an answer."""


class PlainPrompt:
    """Stands in for the renderer of a model without a chat template: the model continues the text of all messages."""

    ends: tuple[int, ...] = ()

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int]:
        text = ""
        for message in messages:
            begins = message["role"] == "user" and text and not text.endswith("\n")
            text += ("\n" if begins else "") + message["content"]
        return encode_text(self.tokenizer, text)


def fit(
    renderer: Renderer | PlainPrompt,
    messages: Sequence[Message],
    limit: int | None,
    new: int | None,
    tools: Sequence[Any] | None = None,
) -> tuple[list[int], int]:
    """Return the token ids of the prompt, and how many of the oldest messages were left out to fit the context.

    A turn (a message of the user and what follows it) is left out as a whole; system messages stay. The answer gets
    room for `new` tokens, but not for more than a quarter of the context.
    """
    first = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    head, turns = list(messages[:first]), list(messages[first:])
    ids = renderer.prompt(messages, tools)
    if limit is None:
        return ids, 0
    room = max(1, min(limit // 4, new or limit))
    dropped = 0
    while len(ids) + room > limit:
        following = next((i for i, message in enumerate(turns) if i and message["role"] == "user"), None)
        if following is None:
            if len(ids) < limit:
                return ids, dropped
            raise ChatError(
                f"the last message needs {len(ids):,} tokens and the context of this model holds {limit:,}: shorten it."
            )
        dropped, turns = dropped + following, turns[following:]
        ids = renderer.prompt([*head, *turns], tools)
    return ids, dropped


@dataclass
class Chat:
    """A conversation with a model."""

    model: Model
    tokenizer: Any
    renderer: Renderer | None = None
    """None: the model has no chat template and continues the text."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Answer i (from 0) uses the seed `seed + i`."""
    max_new_tokens: int | None = None
    """Default: as many as the context holds, at most 8192; 64 for a model without a chat template."""
    messages: list[Message] = field(default_factory=list)
    answers: int = 0
    engine: Engine = "auto"
    """As for `gf.generate`; "auto" compiles the kernels for an answer of any length."""
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.model, DecoderLM):
            raise ChatError(f"chatting needs a decoder-only model, and this one is a {type(self.model).__name__}.")
        if self.tokenizer is None:
            raise ChatError("the model folder has no tokenizer.json, and messages are text: put it there.")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ChatError(f"max_new_tokens={self.max_new_tokens} must be a whole number of at least 1.")
        self.prompts: Renderer | PlainPrompt = self.renderer or PlainPrompt(self.tokenizer)
        self.kept = KeptCache(self.model)
        self.stops = sorted({*self.model.config.special.eos, *self.prompts.ends})

    @property
    def system(self) -> str:
        """The system message; empty if there is none. Assigning an empty text removes it."""
        return str(self.messages[0]["content"]) if self.messages and self.messages[0]["role"] == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        rest = self.messages[1:] if self.system else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self.messages = self.messages[:1] if self.system else []

    def undo(self) -> bool:
        """Forget the last message of the user and its answer; False if there is none."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return False
        del self.messages[asked[-1] :]
        return True

    def ask(self, text: str) -> "Answer":
        """Return the answer to a message, as an iterator of pieces. Both become history once the answer has ended."""
        if not text.strip():
            raise ChatError("the message is empty: write something.")
        return Answer(self, [*self.messages, {"role": "user", "content": text}])


class Answer(Iterator[str]):
    """The pieces of one answer. `end` stores it in the history of the chat; iterating to the end does so too."""

    def __init__(self, chat: Chat, messages: list[Message]):
        assert isinstance(chat.model, DecoderLM)
        self.chat, self.messages = chat, messages
        limit = chat.model.config.max_len
        wanted = chat.max_new_tokens or (PLAIN_TOKENS if chat.renderer is None else None)
        self.prompt, self.dropped = fit(chat.prompts, messages, limit, wanted)
        """The token ids of the prompt, and how many of the oldest messages did not fit the context."""
        room = wanted or NEW_TOKENS
        new = room if limit is None else min(room, limit - len(self.prompt))
        self.seed = chat.seed + chat.answers
        request = read_request(
            chat.model, [self.prompt], new, chat.sampling, seed=self.seed, stop=list(chat.stops), engine=chat.engine,
            precision=chat.precision,
        )  # fmt: skip
        with without_gradients():
            state, self.engine = chat.kept.state(request)
        self.reused: int = getattr(state, "reused", 0)
        """Tokens of the prompt whose keys and values were kept from earlier turns."""
        self.steps = Steps(state, request, self.engine)
        self.new: list[int] = []
        self.pieces = TextPieces()
        self.finished = ""
        """Why it ended: "stop", "length" or "interrupted"; empty while it has not."""

    @property
    def text(self) -> str:
        return self.pieces.text

    def __next__(self) -> str:
        if self.finished:
            raise StopIteration
        step = next(self.steps, None)
        if step is None:
            rest = self.pieces.add(self._decode(), last=True)
            self.end("length")
            return rest
        assert step[0] is not None
        if step[0] in self.chat.stops:
            rest = self.pieces.add(self._decode(), last=True)
            self.new.append(step[0])
            self.end("stop")
            return rest
        self.new.append(step[0])
        return self.pieces.add(self._decode())

    def _decode(self) -> str:
        return str(self.chat.tokenizer.decode(self.new)) if self.new else ""

    def end(self, why: str = "interrupted") -> None:
        """Stop, and make the question and the text so far part of the conversation."""
        if not self.finished:
            self.finished = why
            self.steps.close()
            self.chat.messages = [*self.messages, {"role": "assistant", "content": self.text}]
            self.chat.answers += 1

    def note(self) -> str | None:
        """Return one sentence if messages were left out."""
        if not self.dropped:
            return None
        were = "was" if self.dropped == 1 else "were"
        return f"{plural(self.dropped, 'message')} {were} left out, the oldest first, because the context is full."
