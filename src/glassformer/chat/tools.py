"""Tools: functions that a chat template describes to the model, and the calls that the model writes.

How a call is written is up to the template. It is read from the template itself, which renders a made-up call: the
text in front of the JSON (`<tool_call>` in the style of Hermes and Qwen, `[TOOL_CALLS]` in that of Mistral, nothing in
that of Llama 3.1), the text behind it, and the keys of name and arguments. A template that does not write calls as JSON
is not understood, and its answers stay plain text.
"""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glassformer.chat.errors import ChatError
from glassformer.chat.render import Renderer
from glassformer.generation.text import undecided

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_PROBE, _KEY, _VALUE = "glass_name", "glass_key", "glass_value"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class Call:
    """One call of a function: its name, and its arguments as JSON text."""

    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls`, with a new id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True)
class CallFormat:
    """How a template writes a call: `opening`, JSON with these two keys, `closing`."""

    opening: str
    closing: str
    name: str
    arguments: str

    def read(self, text: str, known: Sequence[str]) -> tuple[str, list[Call], str]:
        """Return the text in front of the calls, the calls, and the text behind them. What is no valid call is text.

        A format without an opening is JSON alone, so the whole text must be calls of `known` functions.
        """
        begin = text.find(self.opening)
        calls: list[Call] = []
        at = max(begin, 0)
        while text.startswith(self.opening, at):
            found = _decode(text, at + len(self.opening))
            read = None if found is None else self._calls(found[0])
            if found is None or not read:
                break
            calls += read
            at = _skip(text, found[1])
            if text.startswith(self.closing, at):
                at = _skip(text, at + len(self.closing))
            if at < len(text) and text[at] in ";,":  # between calls of a format without an opening
                at = _skip(text, at + 1)
        unsure = not self.opening and (text[at:] or any(call.name not in known for call in calls))
        if not calls or unsure:
            return text, [], ""
        return text[:begin].rstrip(), calls, text[at:]

    def _calls(self, value: Any) -> list[Call] | None:
        """Return the calls of a JSON value: an object, or a list of objects. None if it is something else."""
        calls = []
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict) or not isinstance(one.get(self.name), str):
                return None
            given = one.get(self.arguments, {})
            if isinstance(given, str):
                given = _object(given)
            if not isinstance(given, dict):
                return None
            calls.append(Call(one[self.name], json.dumps(given, ensure_ascii=False)))
        return calls


@dataclass
class CallPieces:
    """An answer that grows, in pieces of text. From where a call may begin, everything is held back until the end.

    Joined, the pieces are the text in front of and behind the calls.
    """

    format: CallFormat
    known: Sequence[str]
    text: str = ""
    """The whole answer so far."""
    shown: int = 0
    """Characters that were returned."""
    calls: list[Call] = field(default_factory=list)
    """The calls, after `end`."""

    def add(self, piece: str) -> str:
        """Return what of the answer so far is certainly text."""
        self.text += piece
        opening = self.format.opening
        if opening:
            found = self.text.find(opening)
            sure = found if found >= 0 else len(self.text) - undecided(self.text, (opening,))
            sure = len(self.text[:sure].rstrip())  # blanks in front of a call are no text
        else:
            sure = 0 if self.text.lstrip()[:1] in ("", "{", "[") else len(self.text)
        return self._show(max(sure, self.shown))

    def end(self) -> str:
        """Read the calls, and return the rest of the text."""
        text, self.calls, rest = self.format.read(self.text, self.known)
        return self._show(max(len(text), self.shown)) + rest

    def _show(self, to: int) -> str:
        piece, self.shown = self.text[self.shown : to], to
        return piece


def read_tools(value: Sequence[Any]) -> list[dict[str, Any]]:
    """Return checked tools in OpenAI's format: functions with a name, a description and a JSON schema."""
    found: list[dict[str, Any]] = []
    for number, tool in enumerate(value):
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            raise ChatError(f"tools.{number} is of type {kind!r}: only functions are supported.")
        function = tool.get("function")
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ChatError(
                f"tools.{number}.function.name={name!r} must be a text of 1 to 64 letters, digits, _, - and dots."
            )
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, dict):
            raise ChatError(f"tools.{number}.function.parameters must be a JSON schema, not {type(schema).__name__}.")
        if name in names(found):
            raise ChatError(f"tools.{number}.function.name={name!r} is there twice: give each function a name.")
        found.append({**tool, "type": "function"})
    return found


def names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the functions of checked tools."""
    return [tool["function"]["name"] for tool in tools]


def call_format(renderer: Renderer, tools: Sequence[Any]) -> CallFormat | None:
    """Return how the template writes calls; None if it writes none, or not as JSON."""
    asked = [{"role": "user", "content": "?"}]
    function = {"name": _PROBE, "arguments": {_KEY: _VALUE}}
    call = {"id": "glass0000", "type": "function", "function": function}  # some templates want 9 characters
    for content in ("", None):
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        try:
            before, after = renderer.prompt_text(asked, tools), renderer.render([*asked, answer], tools, "all").text
        except ChatError:
            continue
        return _read_format(after[len(before) :], renderer.special) if after.startswith(before) else None
    return None


def _read_format(written: str, special: set[str]) -> CallFormat | None:
    """Return the format of the answer that a template wrote for the made-up call."""
    at = written.find(f'"{_PROBE}"')
    begins = [i for i, sign in enumerate(written[: max(at, 0)]) if sign in "{["]
    for begin in begins:
        found = _decode(written, begin)
        if found is None or found[1] <= at:
            continue
        value = found[0][0] if isinstance(found[0], list) and len(found[0]) == 1 else found[0]
        keys = _keys(value)
        if keys is None:
            return None
        closing = written[found[1] :].strip()
        end = next((token for token in special if closing.endswith(token)), "")
        closing = closing.removesuffix(end).strip()
        return CallFormat(written[:begin].strip(), closing, *keys)
    return None


def _keys(value: Any) -> tuple[str, str] | None:
    """Return the keys under which an object holds the name and the arguments of the made-up call."""
    if not isinstance(value, dict):
        return None
    name = next((key for key, held in value.items() if held == _PROBE), None)
    given: Iterator[str] = (key for key, held in value.items() if _object(held) == {_KEY: _VALUE})
    arguments = next(given, None)
    return None if name is None or arguments is None else (name, arguments)


def _object(value: Any) -> Any:
    """Return the object of a JSON text; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return None


def _decode(text: str, at: int) -> tuple[Any, int] | None:
    """Return the JSON value that begins there, after blanks, and where it ends."""
    try:
        return _DECODER.raw_decode(text, _skip(text, at))
    except (ValueError, RecursionError):
        return None


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
