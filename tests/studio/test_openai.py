import json

import pytest

import glassformer as gf
from glassformer.generation.kept import KernelTurn
from tests.cli.asking import has_compiler
from tests.studio.serving import parse_events

ASK = {"model": "bard", "prompt": "ROMEO:\n", "max_tokens": 24}


def complete(client, **more):
    reply = client.post("/v1/completions", json={**ASK, **more}, headers={"authorization": "Bearer any"})
    assert reply.status_code == 200, reply.text
    return reply.json()


def streamed(client, **more):
    reply = client.post("/v1/completions", json={**ASK, "stream": True, **more})
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = parse_events(reply.text)
    assert all(name is None for name, _ in events)
    assert events[-1][1] == "[DONE]"
    return [data for _, data in events[:-1]]


def refused(client, status, **body):
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("model", ["bard", "tiny"])
def test_greedy_text_is_that_of_generate(client, models, model):
    loaded = models.get(model)
    prompt = "the cat" if model == "tiny" else ASK["prompt"]
    ids = loaded.encode(prompt)
    wanted = loaded.decode(gf.generate(loaded.model, [ids], 24).new[0])
    response = complete(client, model=model, prompt=prompt, temperature=0)
    assert response["choices"][0]["text"] == wanted
    assert response["choices"][0]["finish_reason"] == "length"
    assert response["usage"] == {"prompt_tokens": len(ids), "completion_tokens": 24, "total_tokens": len(ids) + 24}
    assert response["object"] == "text_completion"
    chunks = streamed(client, model=model, prompt=prompt, temperature=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_sampled_text_is_that_of_generate_with_the_same_seed(client, models):
    loaded = models.get("bard")
    ids = loaded.encode(ASK["prompt"])
    wanted = gf.generate(loaded.model, [ids], 24, gf.Sampling(0.9, top_p=0.8), seed=11).new[0]
    response = complete(client, temperature=0.9, top_p=0.8, seed=11)
    assert response["choices"][0]["text"] == loaded.decode(wanted)


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler here")
def test_requests_are_decoded_by_the_kernels_and_continue_what_was_read_before(client, models, monkeypatch):
    monkeypatch.delenv("GLASSFORMER_NATIVE")
    loaded, text, turns, original = models.get("bard"), "ROMEO:\n", [], KernelTurn.__init__

    def made(turn, *given):
        original(turn, *given)
        turns.append(turn)

    monkeypatch.setattr(KernelTurn, "__init__", made)
    loaded._kept = None  # other tests have used it
    for more in ("\nThe ", " and\n", ""):
        ids = loaded.encode(text)
        new = complete(client, prompt=text, temperature=0)["choices"][0]["text"]
        assert new == loaded.decode(gf.generate(loaded.model, [ids], 24, engine="torch").new[0])
        text += new + more
    assert [turn.reused for turn in turns[:2]] == [0, len(loaded.encode("ROMEO:\n")) + 23]
    assert all(turn.kept is turns[0].kept for turn in turns)
    logprobs = complete(client, prompt=text, temperature=0, logprobs=2)["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 24
    assert all(
        p == max(top.values()) for p, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )


def test_requests_at_the_same_time_do_not_share_a_cache(models):
    loaded = models.get("bard")
    with loaded.kept_cache() as first, loaded.kept_cache() as second:
        assert second is not first
    with loaded.kept_cache() as third:
        assert third is first


def test_a_prompt_may_be_ids_or_one_text_in_a_list(client, models):
    ids = models.get("bard").encode(ASK["prompt"])
    texts = {
        complete(client, prompt=p, temperature=0)["choices"][0]["text"] for p in (ASK["prompt"], [ASK["prompt"]], ids)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("stop", ["e", ["zz", "he"], [" ", "\n"]])
def test_a_stop_text_ends_and_is_not_shown_also_in_a_stream(client, stop):
    whole = complete(client, temperature=0, max_tokens=60)["choices"][0]["text"]
    stops = [stop] if isinstance(stop, str) else stop
    cut = min(at for at in (whole.find(s) for s in stops) if at >= 0)
    choice = complete(client, temperature=0, max_tokens=60, stop=stop)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (whole[:cut], "stop")
    chunks = streamed(client, temperature=0, max_tokens=60, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[:cut]


def test_echo_usage_and_logprobs(client, models):
    response = complete(client, temperature=0, echo=True, logprobs=3)
    assert response["choices"][0]["text"].startswith(ASK["prompt"])
    logprobs = response["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 24
    assert all(
        max(top.values()) == pytest.approx(own)
        for top, own in zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True)
    )
    chunks = streamed(client, temperature=0, stream_options={"include_usage": True})
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert chunks[-1]["choices"] == []


def test_models_are_listed(client):
    response = client.get("/v1/models").json()
    assert response["object"] == "list"
    assert {"bard", "induction", "tiny"} <= {row["id"] for row in response["data"]}
    assert client.get("/v1/models/bard").json()["id"] == "bard"
    for address in ("/v1/models/code/best", "/v1/models/code%2Fbest"):  # the name of a run's checkpoint has a slash
        assert client.get(address).json()["error"]["message"].startswith("there is no model 'code/best' here.")
    assert client.get("/v1/models/unknown").json()["error"]["code"] == "model_not_found"


def test_errors_have_openais_shape(client):
    assert refused(client, 404, **{**ASK, "model": "gpt-4"})["code"] == "model_not_found"
    assert refused(client, 422, **{**ASK, "temperature": 3})["param"] == "temperature"
    assert refused(client, 422, **{**ASK, "n": 2})["param"] == "n"
    assert "empty" in refused(client, 400, **{**ASK, "prompt": ""})["message"]
    assert "'é'" in refused(client, 400, **{**ASK, "prompt": "é"})["message"]
    assert "'é'" in refused(client, 400, **{**ASK, "prompt": "é", "stream": True})["message"]
    assert "cannot generate" in refused(client, 400, **{**ASK, "model": "both", "prompt": [1]})["message"]
    reply = client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert client.get("/v1/nothing").json()["error"]["message"]


def test_the_openai_client_completes_and_streams(server, models):
    """The real package against a real server, where it is installed."""
    openai = pytest.importorskip("openai")
    loaded = models.get("bard")
    wanted = loaded.decode(gf.generate(loaded.model, [loaded.encode(ASK["prompt"])], 24).new[0])
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as asking:
        assert "bard" in [model.id for model in asking.models.list()]
        assert asking.completions.create(**ASK, temperature=0).choices[0].text == wanted
        parts = asking.completions.create(**ASK, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in parts) == wanted


def test_over_a_socket_the_stream_is_the_one_that_clients_read(server, models):
    """Raw HTTP, as the openai package sends it: chunks of `data: {...}`, then `data: [DONE]`; torch is waited for."""
    import http.client

    loaded = models.get("bard")
    wanted = loaded.decode(gf.generate(loaded.model, [loaded.encode(ASK["prompt"])], 24).new[0])
    connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=120)
    headers = {"content-type": "application/json", "authorization": "Bearer sk-none", "accept": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps({**ASK, "temperature": 0, "stream": True}), headers)
    reply = connection.getresponse()
    assert reply.status == 200
    lines = [line for line in reply.read().decode().split("\n") if line]
    connection.close()
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == wanted
