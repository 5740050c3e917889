"""How a template writes calls of tools, and the calls in an answer."""

import json

import pytest

from glassformer.chat.errors import ChatError
from glassformer.chat.render import Renderer
from glassformer.chat.tools import Call, CallFormat, CallPieces, call_format, read_tools
from tests.chat.styles import CALLS, NAMED, STYLES, USER, tokenizer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
HERMES = CallFormat("<tool_call>", "</tool_call>", "name", "arguments")
FORMATS = {
    "hermes": HERMES,
    "listed": CallFormat("<turn>", "", "name", "arguments"),
    "bare": CallFormat("", "", "name", "parameters"),
    "xml": None,
}
ROME, OSLO = Call("weather", '{"city": "Rome"}'), Call("weather", '{"city": "Oslo", "n": 2}')


@pytest.mark.parametrize("style", CALLS)
def test_the_format_is_read_from_the_template(style):
    assert call_format(Renderer(tokenizer(), CALLS[style], NAMED), [WEATHER]) == FORMATS[style]


def test_a_template_without_calls_has_no_format():
    assert call_format(Renderer(tokenizer(), STYLES["tools"], NAMED), [WEATHER]) is None


@pytest.mark.parametrize("style", ["hermes", "listed", "bare"])
def test_what_the_template_writes_is_read_back(style):
    renderer = Renderer(tokenizer(), CALLS[style], NAMED)
    calls = [ROME] if style == "bare" else [ROME, OSLO]
    given = [{**call.to_openai(), "id": "abcdefghi"} for call in calls]
    for one in given:
        one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    before = renderer.prompt_text([USER], [WEATHER])
    written = renderer.render([USER, {"role": "assistant", "content": "", "tool_calls": given}], [WEATHER], "all").text
    answer = written[len(before) :].strip()
    for token in renderer.special:
        answer = answer.removesuffix(token)
    assert FORMATS[style].read(answer, ["weather"]) == ("", calls, "")


@pytest.mark.parametrize(
    ("text", "front", "calls", "behind"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', "", [ROME], ""),
        ('I ask.\n\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}', "I ask.", [ROME], ""),
        (
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call> Done',
            "",
            [ROME],
            "Done",
        ),
        ('<tool_call>{"name": "now"}</tool_call>', "", [Call("now", "{}")], ""),
        ('<tool_call>{"name": "weather", "argum', '<tool_call>{"name": "weather", "argum', [], ""),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', [], ""),
        ('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', [], ""),
        ("no call", "no call", [], ""),
        ("", "", [], ""),
    ],
)
def test_calls_of_an_answer(text, front, calls, behind):
    assert HERMES.read(text, ["weather"]) == (front, calls, behind)
    for size in (1, 3, len(text) or 1):  # streamed, the pieces are the same text
        growing = CallPieces(HERMES, ["weather"])
        shown = [growing.add(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join((*shown, growing.end())) == front + behind
        assert growing.calls == calls
        assert not any("<tool" in piece for piece in shown)


def test_json_alone_is_a_call_only_of_a_known_function():
    bare = FORMATS["bare"]
    text = '{"name": "weather", "parameters": {"city": "Rome"}}'
    assert bare.read(text, ["weather"]) == ("", [ROME], "")
    for other in ('{"name": "Bob", "parameters": {}}', text + " is JSON", '{"age": 5}', "[1, 2]"):
        assert bare.read(other, ["weather"]) == (other, [], "")
        growing = CallPieces(bare, ["weather"])
        assert growing.add(other) == ""
        assert growing.end() == other
    growing = CallPieces(bare, ["weather"])
    assert growing.add("The ") == "The "


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        (["weather"], "tools.0 is of type 'str': only functions"),
        ([{"type": "web_search"}], "tools.0 is of type 'web_search'"),
        ([{"type": "function"}], "tools.0.function.name=None must be"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools.0.function.name='a b' must be"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "must be a JSON schema, not list"),
        ([WEATHER, WEATHER], "tools.1.function.name='weather' is there twice"),
    ],
)
def test_wrong_tools(tools, sentence):
    with pytest.raises(ChatError, match=sentence.replace("[", r"\[")):
        read_tools(tools)
