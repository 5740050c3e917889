"""From a row of a data file to messages: six formats, recognised by their keys.

| format | keys |
|---|---|
| `messages` | `messages`: a list of `role` and `content` (OpenAI), and optionally `weight` 0 or 1 of a message |
| `sharegpt` | `conversations`: a list of `from` and `value` |
| `alpaca` | `instruction`, `output`, optionally `input` |
| `prompt` | `prompt`, `completion`: texts, or lists of messages |
| `preference` | `chosen`, `rejected`: texts or lists of messages; `prompt` unless both lists begin with it |
| `text` | `text`: a plain document without roles |

Every format with roles may have `tools`, a list of functions that the template describes to the model (or the JSON text
of such a list). A prompt that is a text becomes a message of the user, an answer that is a text one of the assistant.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from glassformer.chat.errors import ChatError
from glassformer.chat.rows import Row, read_rows
from glassformer.config.choices import ChatFormat
from glassformer.errors import listing

Format = ChatFormat
Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
    "system": "system",
}
KEYS: dict[str, tuple[str, ...]] = {
    "preference": ("chosen", "rejected"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt": ("prompt", "completion"),
    "text": ("text",),
}
"""The keys that a format needs, in the order in which formats are tried."""


@dataclass(frozen=True)
class Example:
    """One row: messages, or a pair of answers, or a text."""

    place: str
    messages: list[Message] = field(default_factory=list)
    """The whole conversation; for a preference, its prompt."""
    tools: list[Any] | None = None
    text: str | None = None
    chosen: list[Message] | None = None
    rejected: list[Message] | None = None


def read_examples(path: str | Path, format: Format = "auto", system: str = "") -> Iterator[Example]:
    """Yield the examples of a file or folder. `system` is a system message for conversations that have none."""
    if format not in get_args(Format):
        raise ChatError(f"format={format!r} is not known: use {listing(list(get_args(Format)))}.")
    count = 0
    for row in read_rows(path):
        count += 1
        yield _with_system(to_example(row, format), system)
    if not count:
        raise ChatError(f"{path} has no rows: there is nothing to learn.")


def _with_system(example: Example, system: str) -> Example:
    if not system or example.text is not None or (example.messages and example.messages[0]["role"] == "system"):
        return example
    messages = [{"role": "system", "content": system}, *example.messages]
    return replace(example, messages=messages)


def to_example(row: Row, format: Format = "auto") -> Example:
    """Return the example of one row, in the given format or in the one that its keys show."""
    name = _recognize(row) if format == "auto" else format
    for key in KEYS[name]:
        if row.value.get(key) is None:
            given = ", ".join(sorted(row.value)) or "none"
            raise ChatError(f"{row.place}, has no {key!r}, which the format {name} needs; its keys are {given}.")
    example = READERS[name](row)
    return example if name == "text" else replace(example, tools=_tools(row))


def _tools(row: Row) -> list[Any] | None:
    tools = row.value.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)  # tables store a list of unlike objects as text
        except ValueError:
            raise ChatError(f"{row.place}, has tools that are not valid JSON: they must be a list.") from None
    if tools and not isinstance(tools, list):
        raise ChatError(f"{row.place}, has tools of type {type(tools).__name__}: they must be a list.")
    return tools or None


def _recognize(row: Row) -> str:
    for name, keys in KEYS.items():
        if all(key in row.value for key in keys):
            return name
    given = ", ".join(sorted(map(str, row.value))) or "none"
    wanted = "; ".join(" and ".join(keys) for keys in KEYS.values())
    raise ChatError(f"{row.place}, has the keys {given}, but a known format has one of: {wanted}.")


def _messages(row: Row) -> Example:
    return Example(row.place, read_messages(row.value["messages"], row.place))


def _sharegpt(row: Row) -> Example:
    given = row.value["conversations"]
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ChatError(f"{row.place}, has conversations that are not a list of objects with from and value.")
    messages = []
    for number, one in enumerate(given, 1):
        role = SHAREGPT.get(str(one.get("from")))
        if role is None:
            raise ChatError(
                f"{row.place}, message {number}, is from {one.get('from')!r}: use {listing(list(SHAREGPT))}."
            )
        weight = {} if one.get("weight") is None else {"weight": one["weight"]}
        messages.append({"role": role, "content": one.get("value"), **weight})
    return Example(row.place, read_messages(messages, row.place))


def _alpaca(row: Row) -> Example:
    question, extra = _text(row, "instruction"), row.value.get("input") or ""
    if not isinstance(extra, str):
        raise ChatError(f"{row.place}, has an input of type {type(extra).__name__}: it must be a text.")
    content = f"{question}\n\n{extra}" if extra else question
    pair = [{"role": "user", "content": content}, {"role": "assistant", "content": _text(row, "output")}]
    return Example(row.place, read_messages(pair, row.place))


def _prompt(row: Row) -> Example:
    prompt = _part(row, "prompt", "user")
    return Example(row.place, _checked([*prompt, *_part(row, "completion", "assistant")], row.place))


def _preference(row: Row) -> Example:
    chosen, rejected = (_part(row, key, "assistant") for key in ("chosen", "rejected"))
    if row.value.get("prompt") is not None:
        prompt = _part(row, "prompt", "user")
    else:
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise ChatError(f"{row.place}, has no prompt, and chosen and rejected do not begin with the same messages.")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer:
            raise ChatError(f"{row.place}, has no answer in {name} after the prompt: chosen and rejected must differ.")
        _checked([*prompt, *answer], row.place)
    return Example(row.place, prompt, chosen=chosen, rejected=rejected)


def _plain(row: Row) -> Example:
    return Example(row.place, text=_text(row, "text"))


READERS: dict[str, Callable[[Row], Example]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt": _prompt,
    "preference": _preference,
    "text": _plain,
}


def _text(row: Row, key: str) -> str:
    value = row.value[key]
    if not isinstance(value, str) or not value.strip():
        what = "is empty" if isinstance(value, str) else f"is of type {type(value).__name__}"
        raise ChatError(f"{row.place}: {key} {what}; it must be a text.")
    return value


def _part(row: Row, key: str, role: str) -> list[Message]:
    """Return a text as one message of `role`, or a list of messages."""
    value = row.value[key]
    if isinstance(value, str):
        return [{"role": role, "content": _text(row, key)}]
    return _read_list(value, f"{row.place}: {key}")


def read_messages(value: Any, place: str, answers: bool = True) -> list[Message]:
    """Return checked messages: known roles, contents that are texts, and no empty answer if `answers` are learned."""
    messages = _read_list(value, place)
    return _checked(messages, place) if answers else messages


def _read_list(value: Any, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        what = "empty" if isinstance(value, list) else f"of type {type(value).__name__}"
        raise ChatError(f"{place}: the list of messages is {what}; it must have at least one message.")
    return [_read_message(one, f"{place}, message {number}") for number, one in enumerate(value, 1)]


def _read_message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise ChatError(f"{place}, is of type {type(value).__name__}: it must be an object with role and content.")
    role = value.get("role")
    if role not in ROLES:
        raise ChatError(f"{place}, has the role {role!r}: use {listing(list(ROLES))}.")
    if value.get("weight") not in (None, 0, 1):
        raise ChatError(f"{place}, has the weight {value['weight']!r}: it must be 0 or 1.")
    message = {key: held for key, held in value.items() if held is not None}
    if message.get("tool_calls"):
        message["tool_calls"] = _read_calls(message["tool_calls"], place)
    content = value.get("content")
    if content is None and message.get("tool_calls"):
        return message
    return {**message, "content": _content(content, place)}


def _read_calls(calls: Any, place: str) -> list[Any]:
    """Return calls whose arguments are objects, as templates expect them: OpenAI's format holds them as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ChatError(f"{place}, has tool_calls that are not a list of objects.")
    made = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                given = json.loads(function["arguments"] or "{}")
            except ValueError:
                given = None
            if not isinstance(given, dict):
                raise ChatError(
                    f"{place}, calls {function.get('name')!r} with arguments that are not a JSON object: "
                    f"{function['arguments'][:60]!r}."
                )
            call = {**call, "function": {**function, "arguments": given}}
        made.append(call)
    return made


def _content(content: Any, place: str) -> str:
    """Return a content as text. A list of parts of type text is joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{place}, has a content of type {type(content).__name__}: it must be a text.")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatError(f"{place}, has a content part of type {kind!r}: only text is supported.")
    return "".join(part["text"] for part in content)


def _checked(messages: list[Message], place: str) -> list[Message]:
    for number, message in enumerate(messages, 1):
        answers = message["role"] == "assistant" and message.get("weight") != 0
        if answers and not (message.get("content") or "").strip() and not message.get("tool_calls"):
            raise ChatError(
                f"{place}, message {number}, is an empty answer of the assistant: fill it, or set its weight to 0."
            )
    return messages
