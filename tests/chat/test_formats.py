import json

import pytest

from glassformer.chat.formats import ChatError, read_examples, to_example
from glassformer.chat.rows import Row

ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
GOOD = {
    "messages": {"messages": [ASK, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "prompt": {"prompt": "q", "completion": [SAY]},
}


@pytest.mark.parametrize("format", GOOD)
def test_formats_are_recognised_and_give_the_same_messages(format):
    for named in ("auto", format):
        assert to_example(Row(GOOD[format], "here"), named).messages == [ASK, SAY]


def test_other_formats():
    assert to_example(Row({"text": "a b"}, "here")).text == "a b"
    row = {"instruction": "q", "input": "x", "output": "a"}
    assert to_example(Row(row, "here")).messages[0]["content"] == "q\n\nx"
    other = {"role": "assistant", "content": "b"}
    for pair in (
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [ASK], "chosen": [SAY], "rejected": [other]},
        {"chosen": [ASK, SAY], "rejected": [ASK, other]},
    ):
        example = to_example(Row(pair, "here"))
        assert (example.messages, example.chosen, example.rejected) == ([ASK], [SAY], [other])
    tools = [{"type": "function"}]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    example = to_example(Row({"messages": [ASK, calls], "tools": tools}, "here"))
    assert example.tools == tools
    assert example.messages[1]["tool_calls"] == calls["tool_calls"]
    for name, row in GOOD.items():
        wanted = None if name == "text" else tools
        for given in (tools, json.dumps(tools)):
            assert to_example(Row({**row, "tools": given}, "here")).tools == wanted
        assert to_example(Row({**row, "tools": []}, "here")).tools is None


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "q"}, "has the keys question, but a known format has one of"),
        ({}, "has the keys none"),
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": "hello"}, "the list of messages is of type str"),
        ({"messages": ["hello"]}, "message 1, is of type str"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "message 1, has the role 'bot': use system"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, "message 2, has a content of type NoneType"),
        ({"messages": [ASK, {"role": "assistant", "content": " "}]}, "message 2, is an empty answer"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content part of type 'image_url'"),
        ({"messages": [{**SAY, "weight": 2}]}, "has the weight 2: it must be 0 or 1"),
        ({"messages": [SAY], "tools": "x"}, "tools that are not valid JSON"),
        ({"messages": [SAY], "tools": {"type": "function"}}, "tools of type dict"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "message 1, is from 'alien'"),
        ({"conversations": "x"}, "conversations that are not a list"),
        ({"conversations": [{"from": "gpt"}]}, "message 1, has a content of type NoneType"),
        ({"instruction": "q", "output": ""}, "output is empty"),
        ({"instruction": 3, "output": "a"}, "instruction is of type int"),
        ({"instruction": "q", "input": 3, "output": "a"}, "input of type int"),
        ({"instruction": "q", "output": None}, "has no 'output', which the format alpaca needs"),
        ({"prompt": "q", "completion": ""}, "completion is empty"),
        ({"prompt": "q", "completion": []}, "completion: the list of messages is empty"),
        ({"text": None}, "has no 'text'"),
        ({"chosen": [SAY], "rejected": [{**SAY, "content": "b"}]}, "has no prompt"),
        ({"chosen": [ASK, SAY], "rejected": [ASK, SAY]}, "no answer in chosen after the prompt"),
    ],
)
def test_a_bad_row_gives_one_sentence_with_its_line(tmp_path, row, sentence):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD["messages"]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ChatError, match=sentence) as caught:
        list(read_examples(path))
    assert f"{path}, line 2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_format_that_is_named_is_required(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD["alpaca"]))
    with pytest.raises(ChatError, match="line 1, has no 'messages', which the format messages needs"):
        list(read_examples(path, "messages"))
    with pytest.raises(ChatError, match="format='xml' is not known: use auto, messages"):
        list(read_examples(path, "xml"))
    path.write_text("\n")
    with pytest.raises(ChatError, match="has no rows"):
        list(read_examples(path))


def test_a_system_message_is_put_where_there_is_none(tmp_path):
    path = tmp_path / "data.jsonl"
    own = {"messages": [{"role": "system", "content": "mine"}, ASK, SAY]}
    path.write_text("\n".join(json.dumps(row) for row in (GOOD["alpaca"], own, {"text": "t"})))
    first, second, third = read_examples(path, system="be kind")
    assert first.messages[0] == {"role": "system", "content": "be kind"}
    assert second.messages[0]["content"] == "mine"
    assert third.messages == []
