import logging

import pytest
import torch
from pydantic import ValidationError
from safetensors.numpy import load
from starlette.testclient import TestClient

from glassformer.studio import Settings, schema
from glassformer.studio import app as app_module
from glassformer.studio.app import create_app
from glassformer.studio.errors import BusyError, LoadingError
from glassformer.studio.responses import describe_error
from glassformer.studio.settings import Limits


def test_each_error_has_its_status_and_sentence():
    assert describe_error(BusyError("busy."))[0] == 429
    assert describe_error(LoadingError("soon."))[1] == {"error": "soon.", "loading": True}
    assert describe_error(ValueError("two\n  lines"))[1] == {"error": "two lines"}
    assert describe_error(OverflowError())[0] == 400
    with pytest.raises(ValidationError) as caught:
        schema.ModelRequest(model=3)
    assert describe_error(caught.value)[0] == 422
    assert describe_error(caught.value, v1=True)[1]["error"]["param"] == "model"


def test_an_internal_error_is_logged_and_not_sent(caplog):
    with caplog.at_level(logging.ERROR):
        status, body = describe_error(ZeroDivisionError("secret"))
    assert status == 500
    assert "secret" not in str(body)
    assert "secret" in caplog.text


def test_a_bug_in_a_view_is_one_500_and_the_server_goes_on(client, ask, monkeypatch, caplog):
    def broken(models, request):
        raise ZeroDivisionError

    monkeypatch.setitem(app_module.TORCH_VIEWS, "lens", (schema.Lens, broken))
    reply = client.post("/api/lens", json={"model": "bard", "ids": [1]})
    assert reply.status_code == 500
    assert "internal error" in reply.json()["error"]
    assert ask("depth", model="bard", ids=[1, 2])


def test_a_busy_studio_responds_with_retry_after(client, monkeypatch, studio):
    monkeypatch.setattr(studio.quick, "load", studio.quick.capacity)
    reply = client.post("/api/tokens", json={"model": "bard", "text": "a"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    assert client.post("/api/generate", json={"model": "bard", "text": "a"}).status_code == 429


def test_work_that_takes_too_long_is_504(tmp_path, monkeypatch):
    def slow(models, request):
        while True:
            torch.ones(1) + 1

    monkeypatch.setitem(app_module.TORCH_VIEWS, "lens", (schema.Lens, slow))
    app = create_app(Settings(folder=tmp_path, warm=False, limits=Limits(quick_seconds=0.2)))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        reply = client.post("/api/lens", json={"model": "bard", "ids": [1]})
    assert reply.status_code == 504
    assert "longer than 0.2 s" in reply.json()["error"]


def test_until_torch_is_imported_only_recorded_responses_are_returned(tmp_path, monkeypatch):
    app = create_app(Settings(folder=tmp_path, warm=True))
    torch_loader = app.state.studio.torch_loader
    monkeypatch.setattr(torch_loader, "start", lambda: None)
    prompt = "ROMEO:\nBut soft, what light"
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/api/state").json()["torch"] == "loading"
        response = client.post("/api/tokens", json={"model": "bard", "text": prompt})
        assert response.status_code == 200
        assert len(response.json()["ids"]) == 27
        lens = client.post("/api/lens", json={"model": "bard", "ids": response.json()["ids"]})
        assert lens.status_code == 200
        patterns = client.post("/api/patterns", json={"model": "bard", "ids": response.json()["ids"], "where": "self"})
        assert load(patterns.content)["pattern"].dtype == "uint8"
        reply = client.post("/api/tokens", json={"model": "bard", "text": "other"})
        assert reply.status_code == 503
        assert reply.json()["loading"] is True
        # The page sends this header, so that a browser does not log an error.
        reply = client.post("/api/tokens", json={"model": "bard", "text": "other"}, headers={"prefer": "respond-async"})
        assert reply.status_code == 202
        assert reply.json()["loading"] is True
        assert client.post("/api/anatomy", json={"model": "bard"}).status_code == 200
        assert client.post("/api/size", json={"preset": "gpt2"}).status_code == 200
        assert client.get("/api/train/presets").status_code == 503
