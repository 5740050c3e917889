"""From messages to token ids, and which of them the assistant wrote. Training, `glass chat` and the server all use it.

The rendered text is encoded as a whole and without added special tokens, because the template writes those itself: a
second BOS is never put in front. What looks like a special token inside a message is encoded as ordinary text, so that
nothing a user writes can end a turn or begin another one.

The answers of the assistant are found by the template's `generation` blocks. A template without them is rendered up to
each answer and with it; what the second text adds to the first is the answer, up to and including its end token.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from glassformer.chat.errors import ChatError
from glassformer.chat.template import CHATML, CHATML_TOKENS, GUARD, ChatTemplate, RenderedText

Learned = Literal["assistant", "last", "all"]
"""The tokens with loss: those of every answer, those of the last answer, or all."""
Span = tuple[int, int]
_EDGE = "\ue0f3"
"""A token that is put in front of a segment of text, so that it is not encoded as the beginning of a text."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model reads it."""

    text: str
    ids: list[int]
    mask: list[bool]
    """True for tokens that are learned."""
    offsets: list[Span]
    """Characters (begin, end) of each token."""


class Renderer:
    """A chat template with the tokenizer whose ids it is rendered into (`tokenizers.Tokenizer`)."""

    def __init__(self, tokenizer: Any, template: str, tokens: Mapping[str, str] | None = None):
        self.tokenizer = tokenizer
        self.template = ChatTemplate(template, tokens)
        added = tokenizer.get_added_tokens_decoder().values()
        self.special = {token.content for token in added if token.special}
        """Tokens that no message may contain."""
        self.control = self.special | {
            token.content for token in added if token.content in self.template.literals and not token.content.isspace()
        }
        """These, and other tokens that the template writes: only an answer may contain them."""
        self._added = {token.content: token for token in added}

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant begins to answer."""
        return self.encode(self._render(messages, answer=True, tools=tools))[0]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        learned: Learned = "assistant",
    ) -> Rendered:
        """Return the token ids of a whole conversation, and which of them are learned.

        A message with the weight 0 is never learned, except with `learned="all"`.
        """
        rendered = self._render(messages, tools=tools)
        ids, offsets = self.encode(rendered)
        if learned == "all":
            return Rendered(rendered.text, ids, [True] * len(ids), offsets)
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [number for number in answers if messages[number].get("weight") != 0]
        wanted = [number for number in wanted if learned != "last" or number == answers[-1]]
        if self.template.has_generation and len(rendered.answers) == len(answers):
            spans = dict(zip(answers, rendered.answers, strict=True))
        else:
            spans = {number: self._added_by(messages, number, rendered, tools) for number in wanted}
        kept = [spans[number] for number in wanted]
        return Rendered(rendered.text, ids, [_overlaps(one, kept) for one in offsets], offsets)

    def plain(self, text: str) -> list[int]:
        """Return the token ids of a text in which no token has a special meaning."""
        return self.encode(RenderedText(text, literal=[(0, len(text))]))[0] if text else []

    @cached_property
    def ends(self) -> list[int]:
        """The token that ends an answer in this template; empty if it writes none."""
        known = sorted(token for token in self.tokenizer.get_vocab() if token.isalpha())
        for marker in ("glass", *known[:1]):  # a small vocabulary has not all letters
            try:
                rendered = self._render([{"role": "user", "content": marker}, {"role": "assistant", "content": marker}])
                ids, offsets = self.encode(rendered)
                break
            except ChatError:
                continue
        else:
            return []
        end = rendered.text.rfind(marker) + len(marker)
        after = [token for token, (begin, _) in zip(ids, offsets, strict=True) if begin >= end]
        special = {self._id(text) for text in self.special}
        return after[:1] if after and after[0] in special else []

    def prompt_text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> str:
        """Return the rendered text of a conversation, up to where the assistant begins to answer."""
        return self._render(messages, answer=True, tools=tools).text

    def _render(
        self, messages: Sequence[Mapping[str, Any]], answer: bool = False, tools: Sequence[Any] | None = None
    ) -> RenderedText:
        given = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        return self.template.render(given, answer=answer, tools=tools, guard=self._guard)

    def _guard(self, text: str, role: str) -> str:
        """Put a GUARD at both ends of everything that looks like a token and may not be one."""
        pattern = self._special_pattern if role == "assistant" else self._control_pattern
        return text if pattern is None else pattern.sub(rf"{GUARD}\g<0>{GUARD}", text)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        return _any_of(self.special)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        return _any_of(self.control)

    def _added_by(
        self, messages: Sequence[Mapping[str, Any]], number: int, whole: RenderedText, tools: Sequence[Any] | None
    ) -> Span:
        """Return the characters of one answer: what it adds to the messages before it, up to its end token."""
        before = self._render(messages[:number], answer=True, tools=tools).text
        after = self._render(messages[: number + 1], tools=tools).text
        begin, end = len(before), _end_of_answer(after, len(before), self.special)
        if not after.startswith(before) or not whole.text.startswith(after[:end]):
            raise ChatError(
                f"the chat template writes message {number + 1} differently once it is history, so its tokens cannot "
                "be found: learn the last answer only, or use a template with generation blocks."
            )
        return begin, end

    def encode(self, rendered: RenderedText) -> tuple[list[int], list[Span]]:
        """Return the token ids of a rendered text, and the characters of each."""
        if not rendered.literal:
            encoded = self._encode(self.tokenizer, rendered.text)
            return list(encoded.ids), list(encoded.offsets)
        ids: list[int] = []
        offsets: list[Span] = []
        at = 0
        for begin, end, token in [*self._tokens_in(rendered), (len(rendered.text), len(rendered.text), None)]:
            segment = rendered.text[at:begin]
            if segment:
                found = self._encode(self._without_tokens, _EDGE + segment if at else segment)
                skip = 1 if at else 0
                self._refuse_special(found.ids[skip:])
                ids += found.ids[skip:]
                offsets += [(a - skip + at, b - skip + at) for a, b in found.offsets[skip:]]
            if token is not None:
                ids.append(token)
                offsets.append((begin, end))
            at = end
        return ids, offsets

    def _refuse_special(self, ids: list[int]) -> None:
        """Refuse the text of a message that has no other encoding than a special token: an ordinary token made one."""
        for text in self.special:
            if self._id(text) in ids:
                raise ChatError(f"a message holds {text!r}, which is a special token of this model: leave it out.")

    def _tokens_in(self, rendered: RenderedText) -> list[tuple[int, int, int]]:
        """Return (begin, end, id) of the tokens that the template wrote, with the spaces that belong to them."""
        pattern, text = _any_of(set(self._added)), rendered.text
        found: list[tuple[int, int, int]] = []
        for match in pattern.finditer(text) if pattern is not None else ():
            begin, end = match.span()
            if any(begin < b and end > a for a, b in rendered.literal):
                continue
            token = self._added[match[0]]
            if token.lstrip:
                begin = max(len(text[:begin].rstrip()), found[-1][1] if found else 0)
            if token.rstrip:
                end = len(text) - len(text[end:].lstrip())
            found.append((begin, end, self._id(match[0])))
        return found

    @cached_property
    def _without_tokens(self) -> Any:
        """The tokenizer without its added tokens, but with one that marks the edge of a segment."""
        from tokenizers import AddedToken, Tokenizer

        described = json.loads(self.tokenizer.to_str())
        described["added_tokens"] = []
        made = Tokenizer.from_str(json.dumps(described))
        made.add_tokens([AddedToken(_EDGE, normalized=False)])
        return made

    def _id(self, text: str) -> int:
        token: int = self.tokenizer.token_to_id(text)
        return token

    def _encode(self, tokenizer: Any, text: str) -> Any:
        try:
            return tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception for what its vocabulary lacks
            pattern = _any_of(set(self._added))
            for character in text if pattern is None else pattern.sub("", text):
                try:
                    tokenizer.encode(character, add_special_tokens=False)
                except Exception:
                    raise ChatError(
                        f"the messages hold {character!r} (U+{ord(character):04X}), which is none of the "
                        f"{tokenizer.get_vocab_size()} tokens of this model: leave it out."
                    ) from None
            raise ChatError(f"the tokenizer cannot encode the messages: {error}.") from None


def load_renderer(path: str | Path) -> Renderer | None:
    """Return the renderer of a model folder or file; None if it has no chat template."""
    from glassformer.weights import load_chat_template, load_special_tokens, load_tokenizer

    template = load_chat_template(path)
    if template is None:
        return None
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise ChatError(f"{path} has a chat template but no tokenizer: put its tokenizer.json there.")
    return Renderer(tokenizer, template, load_special_tokens(path))


def add_chatml(tokenizer: Any) -> tuple[Any, str]:
    """Return a copy of a tokenizer with the two tokens of our own template, and that template."""
    from tokenizers import AddedToken, Tokenizer

    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHATML_TOKENS])
    return made, CHATML


def _any_of(texts: set[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches one of the texts, the longest that does."""
    ordered = sorted((text for text in texts if text), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _end_of_answer(text: str, begin: int, special: set[str]) -> int:
    """Return where an answer ends: behind its last special token if only blanks follow it, otherwise at the end."""
    stripped = len(text.rstrip())
    ends = any(text[begin:stripped].endswith(token) for token in special)
    return stripped if ends else len(text)


def _overlaps(token: Span, spans: list[Span]) -> bool:
    """Return whether a token has characters in a span. A token without characters must lie inside."""
    begin, end = token
    return any(begin < b and end > a and (begin < end or begin > a) for a, b in spans)
