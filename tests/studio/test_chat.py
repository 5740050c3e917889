import json

import pytest
import torch
from starlette.testclient import TestClient

import glassformer as gf
from glassformer.chat.render import load_renderer
from glassformer.studio import Settings
from glassformer.studio.app import create_app
from glassformer.studio.openai import TextGeneration
from tests.chat import models as chat_models
from tests.chat.styles import ANSWER, CALLS, TOKENS, USER
from tests.studio.serving import parse_events

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASK = {"model": "chatty", "messages": [USER], "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return chat_models.write(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture(scope="module")
def client(folder, tmp_path_factory):
    app = create_app(Settings((folder,), folder=tmp_path_factory.mktemp("studio"), warm=False))
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def openai_client(client):
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0, http_client=client)


@pytest.fixture(scope="module")
def model(folder):
    return gf.load(folder)


def asked(client, **more):
    reply = client.post("/v1/chat/completions", json={**ASK, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(client, **more):
    reply = client.post("/v1/chat/completions", json={**ASK, "stream": True, **more})
    assert reply.status_code == 200, reply.text
    events = parse_events(reply.text)
    assert all(name is None for name, _ in events)
    assert events[-1][1] == "[DONE]"
    return [data for _, data in events[:-1]]


def greedy(folder, model, messages, new=12, sampling=None, seed=0):
    """What a run of its own answers: ids of the prompt, new ids, text."""
    renderer = load_renderer(folder)
    prompt = renderer.prompt(messages)
    new = gf.generate(model, [prompt], new, sampling, stop=renderer.ends, seed=seed).new[0]
    visible = [token for token in new if token not in renderer.ends]
    return prompt, new, renderer.tokenizer.decode(visible)


def test_the_answer_is_that_of_generate_on_the_rendered_messages(client, folder, model):
    for messages in ([USER], [{"role": "system", "content": "be"}, USER, ANSWER, USER]):
        prompt, new, text = greedy(folder, model, messages)
        whole = asked(client, messages=messages)
        (choice,) = whole["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert whole["usage"]["prompt_tokens"] == len(prompt)
        assert whole["usage"]["completion_tokens"] == len(new)
        assert whole["usage"]["total_tokens"] == len(prompt) + len(new)
        assert whole["object"] == "chat.completion"
        assert whole["id"].startswith("chatcmpl-")
        assert choice["finish_reason"] == ("length" if len(new) == 12 else "stop")


def test_a_stream_has_the_exact_chunks(client):
    whole = asked(client)
    chunks = streamed(client, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])
    assert "".join(delta["content"] for delta in deltas[1:-1]) == whole["choices"][0]["message"]["content"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [whole["choices"][0]["finish_reason"]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert "usage" not in streamed(client)[-1]


def test_the_openai_client_works_unchanged(openai_client, folder, model):
    _, _, text = greedy(folder, model, [USER])
    whole = openai_client.chat.completions.create(**ASK)
    assert whole.choices[0].message.content == text
    again = openai_client.chat.completions.create(**{**ASK, "messages": [USER, whole.choices[0].message, USER]})
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    parts = list(openai_client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    joined = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert joined == text
    assert parts[-1].usage == whole.usage
    logged = openai_client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    assert len(logged.choices[0].logprobs.content[0].top_logprobs) == 2
    assert "chatty" in [one.id for one in openai_client.models.list()]
    with pytest.raises(Exception, match="there is no model 'gpt-4' here"):
        openai_client.chat.completions.create(**{**ASK, "model": "gpt-4"})


def test_stop_texts_seeds_and_several_answers(client, folder, model):
    text = asked(client)["choices"][0]["message"]["content"]
    stop = text[2:5]  # longer than a token, so that it is found across pieces
    cut = text[: text.find(stop)]
    for parts in (
        [asked(client, stop=stop)["choices"][0]["message"]],
        [c["choices"][0]["delta"] for c in streamed(client, stop=[stop])],
    ):
        assert "".join(part.get("content") or "" for part in parts) == cut
    assert asked(client, stop=stop)["choices"][0]["finish_reason"] == "stop"
    drawn = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "n": 3}
    several = [choice["message"]["content"] for choice in asked(client, **drawn)["choices"]]
    wanted = [greedy(folder, model, [USER], sampling=gf.Sampling(1.0, top_p=0.9), seed=5 + i)[2] for i in range(3)]
    assert several == wanted
    chunks = streamed(client, **drawn)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in mine) == wanted[index]
    assert asked(client, **drawn)["usage"]["completion_tokens"] > 12


def test_a_character_of_several_tokens_is_streamed_whole(client, folder, monkeypatch):
    """🐱 is four tokens of this tokenizer, none of which is a character; a stop text may have such tokens, too."""
    text = "on 🐱🐱 é mat"
    ids = gf.load_tokenizer(folder).encode(text, add_special_tokens=False).ids
    assert sum(len(gf.load_tokenizer(folder).decode([i]).replace("\ufffd", "")) for i in ids) < len(text)

    monkeypatch.setattr(TextGeneration, "_tokens", lambda generation, ends: iter(ids))
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in streamed(client)]
    assert "".join(deltas) == asked(client)["choices"][0]["message"]["content"] == text
    assert "🐱" in deltas
    assert not any("\ufffd" in delta for delta in deltas)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in streamed(client, stop="🐱 é")]
    assert "".join(deltas) == "on 🐱"


def test_log_probabilities_have_the_shape_of_chat(client, model, folder):
    whole = asked(client, logprobs=True, top_logprobs=3)["choices"][0]
    tokens = whole["logprobs"]["content"]
    visible = [bytes(token["bytes"]) for token in tokens if token["token"] not in TOKENS]
    assert b"".join(visible).decode(errors="replace") == whole["message"]["content"]
    for token in tokens:
        assert len(token["top_logprobs"]) == 3
        assert token["top_logprobs"][0]["logprob"] == pytest.approx(token["logprob"])  # greedy
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}

    prompt, new, _ = greedy(folder, model, [USER])
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + new]))[0].double().log_softmax(-1)
    wanted = [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(new)]
    assert [token["logprob"] for token in tokens] == pytest.approx(wanted[: len(tokens)], abs=1e-4)
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed(client, logprobs=True)]
    joined = [token["logprob"] for part in parts if part for token in part["content"]]
    assert joined == pytest.approx([token["logprob"] for token in tokens])


def test_old_turns_are_left_out_and_counted(client):
    assert "dropped_messages" not in asked(client)
    assert asked(client, messages=[USER, ANSWER] * 4 + [USER])["dropped_messages"] % 2 == 0
    assert streamed(client, messages=[USER, ANSWER] * 4 + [USER])[0]["dropped_messages"] > 0


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"model": "unknown"}, 404, "there is no model 'unknown' here"),
        ({"model": "bard"}, 400, "bard has no chat template, so it is a model that continues text"),
        ({"messages": []}, 422, "at least 1 item"),
        ({"messages": [{"role": "bot", "content": "x"}]}, 400, "message 1, has the role 'bot'"),
        ({"messages": [{"role": "user"}]}, 400, "message 1, has a content of type NoneType"),
        ({"messages": [{"role": "user", "content": "the mat " * 90}]}, 400, "the last message needs"),
        ({"temperature": 3}, 422, "temperature=3"),
        ({"presence_penalty": 1}, 422, "presence_penalty=1: this field is not supported, so leave it out"),
        ({"logit_bias": {"5": 1}}, 422, "this field is not supported, so leave it out"),
        ({"response_format": {"type": "json_object"}}, 422, "response_format.type='json_object'"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.function.name=None must be a text"),
        ({"tools": [WEATHER]}, 400, "there are tools, and the chat template does not write any"),
        ({"tool_choice": "required"}, 400, "tool_choice='required' is not supported: use 'auto' or 'none'"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "is not supported: use 'auto'"),
        ({"parallel_tool_calls": False}, 400, "parallel_tool_calls=False is not supported"),
        ({"functions": []}, 422, "functions"),
        ({"top_logprobs": 2}, 422, "top_logprobs needs logprobs=true"),
        ({"max_completion_tokens": 3}, 422, "max_tokens and max_completion_tokens differ"),
        ({"n": 100}, 422, "n=100"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_one_sentence_in_openais_shape(client, body, status, sentence, stream):
    reply = client.post("/v1/chat/completions", json={**ASK, "stream": stream, **body})
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert sentence in error["message"]


def test_a_template_that_raises_is_an_error_response(tmp_path):
    broken = chat_models.write(tmp_path / "broken")
    (broken / "chat_template.jinja").write_text("{{ raise_exception('Roles must alternate') }}")
    app = create_app(Settings((broken,), folder=tmp_path / "studio", warm=False))
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        reply = client.post("/v1/chat/completions", json={**ASK, "model": "broken", "stream": True})
    assert reply.status_code == 400
    assert (
        "the chat template refuses these messages: Roles must alternate" in json.loads(reply.text)["error"]["message"]
    )


@pytest.fixture
def calling(tmp_path, monkeypatch):
    """A client of a model with tools, whose answers are scripted; the prompts that it was given."""
    folder = chat_models.write(tmp_path / "chatty", max_len=None)
    (folder / "chat_template.jinja").write_text(CALLS["hermes"])
    prompts, script = [], []

    def pieces(self):
        prompts.append(self.prompt)
        self.finish, self.new = "stop", [1, 2, 3]
        yield from script[-1]

    monkeypatch.setattr(TextGeneration, "pieces", pieces)
    app = create_app(Settings((folder,), folder=tmp_path / "studio", warm=False))
    with TestClient(app, base_url="http://127.0.0.1:8000") as opened:
        yield opened, load_renderer(folder), prompts, script


def test_tools_are_rendered_and_calls_are_read(calling):
    client, renderer, prompts, script = calling
    script.append('Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>')
    (choice,) = asked(client, tools=[WEATHER])["choices"]
    assert prompts[-1] == renderer.prompt([USER], [WEATHER])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    chunks = streamed(client, tools=[WEATHER])
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
    (part,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert part[0]["index"] == 0
    assert part[0]["function"] == call["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    plain = asked(client, tools=[WEATHER], tool_choice="none")["choices"][0]
    assert plain["message"]["content"] == script[-1]
    assert "tool_calls" not in plain["message"]
    assert prompts[-1] == renderer.prompt([USER])


def test_the_openai_client_sends_back_the_result_of_a_call(calling):
    openai = pytest.importorskip("openai")
    client, renderer, prompts, script = calling
    script.append('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>')
    api = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none", max_retries=0, http_client=client)
    answer = api.chat.completions.create(**ASK, tools=[WEATHER]).choices[0].message
    assert answer.content is None
    (call,) = answer.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    script.append("It is sunny.")
    messages = {"messages": [USER, answer, result]}
    final = api.chat.completions.create(**{**ASK, **messages}, tools=[WEATHER])
    assert final.choices[0].message.content == "It is sunny."
    assert final.choices[0].finish_reason == "stop"
    # the arguments are written as an object, not as JSON within JSON
    shown = renderer.tokenizer.decode(prompts[-1], skip_special_tokens=False)
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in shown
    assert "<tool_response>\nsunny\n</tool_response>" in shown
