import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import glassformer
from tests.studio.serving import serving

LIGHT = """
import asyncio, sys
from pathlib import Path
from glassformer.studio import Settings
from glassformer.studio.app import create_app

async def get(app, path):
    seen = {}
    async def receive():
        await asyncio.sleep(3600)  # a client that stays
    async def send(message):
        seen.setdefault("status", message.get("status"))
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
             "root_path": "", "headers": [(b"host", b"localhost")], "asgi": {"version": "3.0"}, "http_version": "1.1",
             "scheme": "http", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}
    await app(scope, receive, send)
    return seen["status"]

async def main():
    app = create_app(Settings(folder=Path(sys.argv[1]), warm=False))
    paths = ["/", "/api/state", "/static/style.css", "/api/claims", "/api/size/presets", "/static/recorded/index.json",
             "/api/size/chinchilla", "/v1/models", "/api/train", "/static/plotly.js"]
    statuses = [await get(app, path) for path in paths]
    print(statuses, [m for m in ("torch", "numpy", "matplotlib", "plotly") if m in sys.modules])

asyncio.run(main())
"""


def test_the_page_its_state_and_canned_answers_need_no_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[200, 200, 200, 200, 200, 200, 400, 200, 200, 200] []"


@pytest.mark.slow
def test_torch_is_imported_once_the_page_reports_that_it_is_drawn(tmp_path):
    with serving(tmp_path) as server:
        with urllib.request.urlopen(server.address) as page:
            assert b"<html" in page.read().lower()
        response = {"model": "bard", "text": "ROMEO:\nBut soft, what light"}
        status, answer = server.post("/api/tokens", response)
        assert (status, len(answer["ids"])) == (200, 27)  # recorded
        time.sleep(0.3)
        assert not imports_torch(server)  # the page has not asked for it yet
        server.wait_for_torch()
        assert imports_torch(server)


def imports_torch(server):
    return "libtorch" in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_state_has_version_models_and_limits(client):
    response = client.get("/api/state").json()
    assert response["version"] == glassformer.__version__
    assert [model["name"] for model in response["models"]] == [
        "bard",
        "induction",
        "bard-chat",
        "tiny",
        "both",
        "pair",
        "table",
        "chatty",
    ]
    assert response["limits"]["upload_bytes"] == 20_000_000
    assert response["recorded"]["prompts"]["bard"]


def test_an_address_that_is_not_there_is_one_sentence(client):
    for path in ("/nothing", "/api/nothing", "/api/train/x/y/z"):
        reply = client.get(path)
        assert reply.status_code == 404
        assert reply.json()["error"].endswith(".")
    assert client.get("/api/tokens").status_code == 405
    assert client.post("/api/state", json={}).status_code == 405
    assert "<script>" not in client.get("/<script>").headers["content-type"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd",
        "/static/%2fetc/passwd", "/static/js/../../settings.py", "/static/....//app.py", "/static/%00",
        "/static/..\\app.py", "/static/", "/static/js",
    ],
)  # fmt: skip
def test_nothing_outside_the_static_folder_is_read(client, path):
    reply = client.get(path)
    assert reply.status_code in (403, 404, 405), reply.text[:80]
    assert "import" not in reply.text


@pytest.mark.parametrize("name", ["../x", "..%2f..%2fx", "%2e%2e", "x%00", "run-1/../../x", "<script>"])
def test_nothing_outside_the_runs_is_reached(client, name):
    for method, path in (("GET", f"/api/train/{name}/events"), ("POST", f"/api/train/{name}/stop")):
        assert client.request(method, path, json={}).status_code in (404, 405)


def test_an_upload_is_text_by_type_and_content(client, studio):
    def send(data, kind="text/plain; charset=utf-8", name="a.txt"):
        return client.post("/api/train/upload", params={"name": name}, content=data, headers={"content-type": kind})

    good = send(b"hello there\n" * 100, name="../../<b>x</b>.txt")
    assert good.status_code == 200
    assert good.json()["title"] == "../../<b>x</b>.txt"  # words for people; the file is named by us
    assert studio.training_runs.corpus(good.json()["corpus"]).parent == studio.training_runs.folder / "corpora"
    for data, kind in ((b"x" * 2000, "text/html"), (b"\xff" * 2000, "text/plain"), (b"", "text/plain")):
        assert send(data, kind).status_code == 400


def test_user_text_comes_back_as_json_never_as_html(client):
    text = "<script>alert(1)</script>"
    reply = client.post("/api/tokens", json={"model": text, "text": "a"})
    assert reply.status_code == 404
    assert reply.headers["content-type"] == "application/json"
    tokens = client.post("/api/tokens", json={"model": "tiny", "text": text})
    assert tokens.json()["text"] == text
    assert tokens.headers["content-type"] == "application/json"


def test_a_job_ends_when_its_client_hangs_up(server):
    """A long generation whose client goes: the worker is free again at once."""
    import http.client

    server.wait_for_torch()
    host = server.address.removeprefix("http://")
    for _ in range(3):
        connection = http.client.HTTPConnection(host, timeout=60)
        body = {"model": "bard", "text": "ROMEO:", "max_new_tokens": 250, "cache": False}
        connection.request("POST", "/api/generate", json.dumps(body), {"content-type": "application/json"})
        connection.getresponse().read(10)
        connection.close()
    began = time.monotonic()
    status, _ = server.post("/api/tokens", {"model": "bard", "text": "a"})
    assert status == 200
    assert time.monotonic() - began < 60
