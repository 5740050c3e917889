import logging

import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

from glassformer.studio import Settings, schema
from glassformer.studio import app as app_module
from glassformer.studio.answers import explained
from glassformer.studio.app import create_app
from glassformer.studio.errors import BusyError, LoadingError
from glassformer.studio.settings import Limits


def test_each_error_has_its_status_and_sentence():
    assert explained(BusyError("busy."))[0] == 429
    assert explained(LoadingError("soon."))[1] == {"error": "soon.", "loading": True}
    assert explained(ValueError("two\n  lines"))[1] == {"error": "two lines"}
    assert explained(OverflowError())[0] == 400
    with pytest.raises(ValidationError) as caught:
        schema.AboutModel(model=3)
    assert explained(caught.value)[0] == 422
    assert explained(caught.value, v1=True)[1]["error"]["param"] == "model"


def test_a_mistake_of_ours_is_logged_and_not_told(caplog):
    with caplog.at_level(logging.ERROR):
        status, body = explained(ZeroDivisionError("secret"))
    assert status == 500
    assert "secret" not in str(body)
    assert "secret" in caplog.text


def test_a_bug_in_a_view_is_one_500_and_the_server_goes_on(client, ask, monkeypatch, caplog):
    def broken(shelf, asked):
        raise ZeroDivisionError

    monkeypatch.setitem(app_module.POSTED, "lens", (schema.Lens, broken))
    reply = client.post("/api/lens", json={"model": "bard", "ids": [1]})
    assert reply.status_code == 500
    assert "mistake" in reply.json()["error"]
    assert ask("depth", model="bard", ids=[1, 2])


def test_a_busy_studio_says_when_to_ask_again(client, monkeypatch, studio):
    def full(ticket, function):
        raise BusyError("the studio is busy: ask again in a moment.")

    monkeypatch.setattr(studio.quick, "submit", full)
    reply = client.post("/api/tokens", json={"model": "bard", "text": "a"})
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "1"
    assert client.post("/api/generate", json={"model": "bard", "text": "a"}).status_code == 429


def test_work_that_takes_too_long_is_504(tmp_path, monkeypatch):
    import time

    def slow(shelf, asked):
        while True:
            time.sleep(0.001)

    monkeypatch.setitem(app_module.POSTED, "lens", (schema.Lens, slow))
    app = create_app(Settings(folder=tmp_path, warm=False, limits=Limits(quick_seconds=0.2)))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        reply = client.post("/api/lens", json={"model": "bard", "ids": [1]})
    assert reply.status_code == 504
    assert "longer than 0.2 s" in reply.json()["error"]


def test_until_torch_is_there_only_canned_answers_are_given(tmp_path, monkeypatch):
    app = create_app(Settings(folder=tmp_path, warm=True))
    engine = app.state.studio.engine
    monkeypatch.setattr(engine, "start", lambda: None)
    prompt = "ROMEO:\nBut soft, what light"
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.get("/api/state").json()["torch"] == "loading"
        told = client.post("/api/tokens", json={"model": "bard", "text": prompt})
        assert told.status_code == 200
        assert len(told.json()["ids"]) == 27
        lens = client.post("/api/lens", json={"model": "bard", "ids": told.json()["ids"]})
        assert lens.status_code == 200
        patterns = client.post("/api/patterns", json={"model": "bard", "ids": told.json()["ids"], "where": "self"})
        assert patterns.content[:4] == b"GLAS"
        reply = client.post("/api/tokens", json={"model": "bard", "text": "other"})
        assert reply.status_code == 503
        assert reply.json()["loading"] is True
        # the page, which asks so, is told the same without an error in its console
        reply = client.post("/api/tokens", json={"model": "bard", "text": "other"}, headers={"prefer": "respond-async"})
        assert reply.status_code == 202
        assert reply.json()["loading"] is True
        assert client.post("/api/anatomy", json={"model": "bard"}).status_code == 200
        assert client.post("/api/size", json={"preset": "gpt2"}).status_code == 200
        assert client.get("/api/train/presets").status_code == 503
