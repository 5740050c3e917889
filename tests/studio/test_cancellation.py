"""Jobs end promptly when their client disconnects: within one token, one event, or one call of a torch function."""

import json
import threading
import time

import anyio
import pytest
import torch

from glassformer.finding import Finding
from glassformer.generation.loop import Steps
from glassformer.studio import Settings, events, schema
from glassformer.studio import app as app_module
from glassformer.studio.api import playground, theory
from glassformer.studio.app import create_app
from glassformer.studio.settings import Limits
from glassformer.theory.claims import claim as claim_module
from glassformer.theory.claims import registry
from tests.chat import models as chat_models

PROMPT = [18, 47, 56]


async def post(app, path, body, leave):
    """POST to an app, as a client that disconnects once the event `leave` is set. Returns the received bytes."""
    received, sent = bytearray(), [json.dumps(body).encode()]

    async def receive():
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        while not leave.is_set():
            await anyio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message):
        received.extend(message.get("body", b""))

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": headers, "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    with anyio.fail_after(60):
        await app(scope, receive, send)
    return bytes(received)


@pytest.fixture
def disconnect(tmp_path):
    """A function that posts and disconnects; it asserts that no job and no thread is left."""
    chatty = chat_models.write(tmp_path / "models" / "chatty", max_len=1000)
    app = create_app(Settings((chatty,), folder=tmp_path, warm=False))

    def run(path, body, leave):
        before = set(threading.enumerate())
        received = anyio.run(post, app, path, body, leave)
        studio = app.state.studio
        assert (studio.quick.load, studio.long.load) == (0, 0)
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
            assert not thread.is_alive()
        return received

    return run


CHAT = {"model": "chatty", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 200, "seed": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"model": "bard", "ids": PROMPT, "max_new_tokens": 200}),
        ("/v1/completions", {"model": "bard", "prompt": PROMPT, "max_tokens": 200}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
    ],
)
def test_generation_stops_within_one_token(disconnect, monkeypatch, path, body):
    leave, tokens = threading.Event(), []

    def counting(made):
        def count(*args):
            tokens.append(args[0])
            if len(tokens) == 3:
                leave.set()
            elif len(tokens) > 3:
                time.sleep(0.05)  # enough for the event loop to see the disconnect
            return made(*args)

        return count

    monkeypatch.setattr(playground, "Step", counting(playground.Step))
    monkeypatch.setattr(Steps, "_gain", counting(Steps._gain))
    disconnect(path, body, leave)
    assert 3 <= len(tokens) <= 6


def test_a_view_stops_at_its_next_torch_call(disconnect, monkeypatch):
    leave, calls = threading.Event(), []

    def endless(models, request):
        while True:
            torch.ones(2) + 1
            calls.append(1)
            leave.set()

    monkeypatch.setitem(app_module.TORCH_VIEWS, "lens", (schema.Lens, endless))
    assert disconnect("/api/lens", {"model": "bard", "ids": PROMPT}, leave) == b""
    assert calls


def test_the_doctor_stops_during_its_first_probes(disconnect, monkeypatch):
    leave, emitted = threading.Event(), []
    encode = events.encode_event

    def record(name, data, id=None):
        emitted.append(name)
        leave.set()
        return encode(name, data, id)

    monkeypatch.setattr(events, "encode_event", record)
    disconnect("/api/doctor", {"model": "induction"}, leave)
    assert "done" not in emitted
    assert len(emitted) < 6


def test_a_claim_stops_at_its_next_piece_of_evidence_and_records_no_verdict(disconnect, monkeypatch):
    leave, parts = threading.Event(), []
    id = "softmax-row-stochastic"
    registry.find(id)  # imports the module with its check

    def check(lab):
        while True:
            yield Finding.skip(id, "a piece of evidence")
            parts.append(1)
            leave.set()

    monkeypatch.setattr(theory, "VERDICTS", {})
    monkeypatch.setitem(claim_module.CHECKS, id, check)
    disconnect(f"/api/claims/{id}/run", {}, leave)
    assert parts
    assert theory.VERDICTS == {}


def test_a_time_limit_ends_a_stream_with_an_error_event(tmp_path, monkeypatch):
    def endless(models, request, emit):
        while True:
            torch.ones(2) + 1

    monkeypatch.setitem(app_module.STREAMED_VIEWS, "patch", (schema.Patch, endless, True))
    app = create_app(Settings(folder=tmp_path, warm=False, limits=Limits(long_seconds=0.2)))
    body = {"model": "bard", "clean": PROMPT, "corrupt": PROMPT}
    received = anyio.run(post, app, "/api/patch", body, threading.Event())
    assert b"event: error" in received
    assert b"longer than 0.2 s" in received
    assert app.state.studio.long.load == 0
