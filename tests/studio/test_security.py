import pytest
from starlette.testclient import TestClient

from glassformer.studio import Settings
from glassformer.studio.app import create_app
from glassformer.studio.settings import Limits

LOCAL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A studio open to others, with a token."""
    folder = tmp_path_factory.mktemp("guarded")
    app = create_app(Settings(host="0.0.0.0", token="right-token", folder=folder, warm=False))
    with TestClient(app, base_url="http://192.168.0.7:8000") as opened:
        yield opened


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "localhost:99", "[::1]:8000", "LOCALHOST"])
def test_names_of_this_machine_are_answered(client, host):
    assert client.get("/api/state", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost:80@evil.example", "", "127.0.0.1:x", "a b", "[::1", "/"],
)
def test_other_names_are_refused_on_every_address(client, host):
    for path in ("/", "/api/state", "/v1/models", "/static/index.html"):
        assert client.get(path, headers={"host": host}).status_code == 403, path


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:8001", "http://127.0.0.1:8000.evil"]
)
def test_other_origins_are_refused(client, origin):
    body = {"model": "bard", "text": "a"}
    assert client.post("/api/tokens", json=body, headers={"origin": origin}).status_code == 403
    assert client.get("/api/state", headers={"origin": origin}).status_code == 403


def test_the_pages_own_origin_passes(client):
    body = {"model": "bard", "text": "a"}
    assert client.post("/api/tokens", json=body, headers={"origin": LOCAL}).status_code == 200


def test_a_cross_site_request_without_origin_is_refused_but_a_link_to_the_page_is_not(client):
    cross = {"sec-fetch-site": "cross-site"}
    assert client.get("/api/state", headers=cross).status_code == 403
    assert client.get("/static/style.css", headers=cross).status_code == 403
    assert client.get("/", headers={**cross, "sec-fetch-mode": "no-cors"}).status_code == 403
    assert client.get("/", headers={**cross, "sec-fetch-mode": "navigate"}).status_code == 200


def test_a_form_of_another_site_cannot_speak_json(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        reply = client.post("/api/tokens", content=b'{"model": "bard", "text": "a"}', headers={"content-type": kind})
        assert reply.status_code == 400


def test_every_response_has_a_content_security_policy(client):
    for path in ("/", "/api/state", "/static/style.css", "/nothing", "/api/nothing"):
        headers = client.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "script-src" not in headers["content-security-policy"]  # default-src: no inline script, no eval
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
    assert client.get("/api/state").headers["cache-control"] == "no-store"


def test_without_the_token_every_request_is_refused(guarded):
    guarded.cookies.clear()
    for path in ("/api/state", "/v1/models", "/api/claims", "/api/train"):
        reply = guarded.get(path)
        assert reply.status_code == 403
        assert "token" in reply.text
    wrong = {"authorization": "Bearer wrong-token"}
    assert guarded.get("/api/state", headers=wrong).status_code == 403
    assert guarded.get("/api/state?token=right-token").status_code == 403  # only the page takes it from its address
    assert guarded.get("/api/state", headers={"cookie": b"glass-token=\xfc; a=;;="}).status_code == 403


def test_the_token_comes_as_a_header_or_as_the_pages_cookie(guarded):
    guarded.cookies.clear()
    assert guarded.get("/api/state", headers={"authorization": "Bearer right-token"}).status_code == 200
    assert "set-cookie" not in guarded.get("/?token=wrong").headers
    cookie = guarded.get("/?token=right-token").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert guarded.get("/api/state").status_code == 200


def test_openai_clients_are_refused_in_their_own_words(guarded):
    guarded.cookies.clear()
    assert guarded.get("/v1/models").json()["error"]["type"] == "invalid_request_error"


def test_a_body_over_its_limit_is_refused_by_its_length_and_by_its_count(tmp_path):
    app = create_app(Settings(folder=tmp_path, warm=False, limits=Limits(body_bytes=1000, upload_bytes=3000)))
    with TestClient(app, base_url=LOCAL) as small:
        head = {"content-type": "application/json"}
        assert small.post("/api/tokens", content=b" " * 1001, headers=head).status_code == 413
        assert small.post("/api/tokens", content=iter([b" " * 600] * 2), headers=head).status_code == 413
        text = {"content-type": "text/plain"}
        assert small.post("/api/train/upload", content=iter([b"a" * 1500] * 2), headers=text).status_code == 200
        assert small.post("/api/train/upload", content=iter([b"a" * 1501] * 2), headers=text).status_code == 413
        assert small.post("/api/train/upload", content=b"a" * 3001, headers=text).status_code == 413


@pytest.mark.parametrize("length", ["-1", "1e3", "abc", "²"])
def test_a_strange_content_length_is_refused(client, length):
    reply = client.request("POST", "/api/tokens", headers={"content-length": length.encode(), "content-type": "x"})
    assert reply.status_code == 400
