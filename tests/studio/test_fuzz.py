"""Requests that no client should send: wrong types, sizes and numbers, paths, scripts. Never a 500, always words."""

import json
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sampled import examples

IDS = [18, 47, 56, 57, 58, 1]
ABOUT = {"model": "bard", "ids": IDS}
BODIES = {
    "tokens": {"model": "bard", "text": "First"},
    "vocabulary": {"model": "bard"},
    "next": {**ABOUT, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "count": 5},
    "generate": {**ABOUT, "max_new_tokens": 3, "temperature": 0.8, "seed": 1, "cache": True},
    "beam": {**ABOUT, "beams": 2, "steps": 2},
    "anatomy": {"model": "bard"},
    "tensor": {**ABOUT, "site": "blocks.0.attention.q", "head": 1},
    "cell": {**ABOUT, "site": "blocks.0.attention.q", "index": [0, 1, 2]},
    "patterns": {**ABOUT, "layer": 1, "where": "self"},
    "heads": {"model": "induction", "seed": 0},
    "ablate": {**ABOUT, "heads": [[0, 1]], "mode": "zero"},
    "lens": {**ABOUT, "top": 2},
    "attribution": {**ABOUT, "answer": 3, "wrong": 4, "position": 1},
    "depth": ABOUT,
    "patch": {"model": "induction", "clean": [1, 2, 3], "corrupt": [4, 2, 5], "answer": 1, "wrong": 2},
    "positions": {"kind": "rotary", "width": 8, "base": 100.0, "length": 8, "offset": 1, "heads": 2, "pair": 1},
    "size": {"preset": "gpt2", "batch": 1, "context": 8, "dtype": "float32"},
    "train": {"corpus": "embedded", "preset": "nano", "fields": {"loop.steps": 5, "model.n_layers": 1}},
    "claims/convex-weights-upper-bound/run": {"seed": 0, "broken": False, "knobs": {}},
    "train/run-none/stop": {},
}  # fmt: skip
OPENAI = {
    "model": "bard",
    "prompt": "To be",
    "max_tokens": 2,
    "temperature": 0,
    "stop": ["x"],
    "stream": False,
    "logprobs": 1,
}

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 10**6, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**70)])
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=20)
    | st.sampled_from(
        ["", "../../etc/passwd", "/etc/passwd", "..\\..\\x", "<script>alert(1)</script>", "\0", "\ud800", "x" * 30_000,
         "bard", "pair", "both", "table", "blocks.*", "blocks.0.cross.q", "logits", "embed", "task:repeat", "{{7*7}}"]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def mutated(draw, templates):
    """A request with some fields replaced, removed or added."""
    path = draw(st.sampled_from(sorted(templates)))
    body = dict(templates[path])
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from([*body, "model", "ids", "text", "target", "config", "nonsense"]))
        if draw(st.integers(0, 5)) == 0:
            body.pop(name, None)
        else:
            body[name] = draw(junk)
    return path, body


@pytest.fixture
def harmless(studio, monkeypatch):
    """No training is really started."""
    monkeypatch.setattr(studio.training_runs, "_spawn", lambda run: None)


def words(reply):
    error = reply.json()["error"]
    return error if isinstance(error, str) else error["message"]


@settings(max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(mutated(BODIES))
def test_no_body_is_a_server_error(client, harmless, asked):
    path, body = asked
    reply = client.post(f"/api/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400, 404, 409, 413, 422), (path, body, reply.status_code, reply.text[:200])
    if reply.status_code != 200:
        assert words(reply)
        assert "Traceback" not in reply.text
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert '"status":500' not in reply.text, (path, body, reply.text[:300])


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(mutated({"v1/completions": OPENAI}))
def test_no_completion_is_a_server_error(client, asked):
    path, body = asked
    reply = client.post(f"/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400, 404, 422), (body, reply.text[:200])
    assert '"server_error"' not in reply.text


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["python", "size/chinchilla", "claims/convex-weights-upper-bound/figure.svg", "train", "state"]),
    st.dictionaries(
        st.sampled_from(["view", "model", "ids", "site", "flops", "params", "seed", "run", "claim", "n", "fields"])
        | st.text(max_size=5),
        st.sampled_from(
            ["next", "tensor", "train", "theory", "bard", "[1,2]", "1e400", "nan", "../x", "<script>", "", "{"]
        )
        | st.text(st.characters(codec="utf-8"), max_size=8),
        max_size=4,
    ),
)
def test_no_query_is_a_server_error(client, path, query):
    assert client.get(f"/api/{path}", params=query).status_code in (200, 400, 404, 422)


@settings(max_examples=examples(60))
@given(
    st.binary(max_size=200)
    | st.sampled_from([b"", b"[" * 50_000, b'{"model":' * 3000, b"1" * 5000, b'"\\ud800"', b"\xef\xbb\xbf{}"])
)
def test_no_bytes_are_a_server_error(client, data):
    for path in ("/api/tokens", "/v1/completions", "/api/train"):
        reply = client.post(path, content=data, headers={"content-type": "application/json"})
        assert reply.status_code in (400, 413, 422)
        assert words(reply)


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"]),
    st.sampled_from(["/", "/api/", "/v1/", "/static/", "/api/claims/", "/api/train/", "/v1/models/"]),
    st.text(st.characters(codec="utf-8", exclude_characters="#?"), max_size=30)
    | st.sampled_from(["../" * 8 + "etc/passwd", "%2e%2e%2f" * 8 + "etc/passwd", "..%5c..%5c", "%00", "%ff"]),
)
def test_no_address_is_a_server_error_or_reads_a_file(client, method, prefix, rest):
    reply = client.request(method, prefix + quote(rest, safe="/%."))
    assert reply.status_code < 500
    assert "root:" not in reply.text
