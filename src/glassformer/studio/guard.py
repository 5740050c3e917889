"""Who may ask, and how much: Host, Origin and token are checked before anything is read; bodies are counted.

* Host must be a name of this machine (any name where the studio was opened to others: there the token protects). A page
  elsewhere that has its own name point here (DNS rebinding) is refused by this.
* Origin, which browsers send with every request that could change something, must be the page's own; a request that a
  browser calls cross-site is refused unless it opens the page itself.
* The token, where there is one, comes as `Authorization: Bearer`, in a cookie, or once as `?token=` of the page.
* Every response says what a page from here may do: load from here, run no inline script, be framed by nobody.
"""

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glassformer.studio.errors import TooLargeError
from glassformer.studio.settings import LOOPBACK, Settings
from glassformer.studio.wire import to_json

COOKIE = "glass-token"
UPLOAD = "/api/train/upload"
# plotly.js sets style attributes, so styles may be inline; scripts never
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Guard:
    """Pure ASGI middleware: it must not stand between a stream and the news that its client has gone."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no websockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        told, cookie = self.refusal(scope, headers), self._cookie(scope)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    sent.setdefault(name, value)
                sent.setdefault("cache-control", "no-store" if _is_api(scope["path"]) else "no-cache")
                if cookie:
                    sent.append("set-cookie", cookie)
            await send(message)

        limits = self.settings.limits
        most = limits.upload_bytes if scope["path"] == UPLOAD else limits.body_bytes
        if told is None:
            length = headers.get("content-length", "0")
            if not (length.isascii() and length.isdigit()):
                told = (400, "Content-Length must be a whole number.")
            elif int(length) > most:
                told = (413, f"a body of {int(length):,} bytes is more than the {most:,} allowed here: send less.")
        if told is not None:
            await refuse(sending, *told, openai=scope["path"].startswith("/v1"))
            return
        await self.app(scope, _counted(receive, most), sending)

    def refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Status and sentence of a request that may not pass."""
        host = headers.get("host", "")
        name = _host_name(host)
        if name is None or (self.settings.is_local and name not in LOOPBACK):
            return 403, "this studio answers only to its own address: open it at http://127.0.0.1."
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "this request comes from another site: use the studio's own page, or a program without Origin."
        path = scope["path"]
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not (
            path == "/" and headers.get("sec-fetch-mode") == "navigate"
        ):
            return 403, "this request comes from another site: use the studio's own page."
        if _is_api(path) and not self._has_token(scope, headers):
            return 403, "this studio needs its token: open the page by the address that `glass serve` printed."
        return None

    def _has_token(self, scope: Scope, headers: Headers) -> bool:
        token = self.settings.token
        if token is None:
            return True
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and _same(given.strip(), token):
            return True
        try:
            held = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return held is not None and _same(held.value, token)

    def _cookie(self, scope: Scope) -> str | None:
        """The cookie of one who opens the page with the right token."""
        token = self.settings.token
        if token is None or scope["path"] != "/":
            return None
        try:
            given = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20).get("token", [""])[0]
        except ValueError:  # too many fields
            return None
        return f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/" if _same(given, token) else None


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _is_api(path: str) -> bool:
    return path.startswith(("/api", "/v1"))


def _host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None for what is none."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  (raises for a bad one)
    except ValueError:
        return None
    return parts.hostname if parts.hostname and "@" not in host and not parts.path else None


def _counted(receive: Receive, most: int) -> Receive:
    """A body without Content-Length is counted as it comes."""
    seen = 0

    async def receiving() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > most:
                raise TooLargeError(f"the body is more than the {most:,} bytes allowed here: send less.")
        return message

    return receiving


async def refuse(send: Send, status: int, sentence: str, openai: bool = False) -> None:
    """An error answer without an application."""
    told = {"message": sentence, "type": "invalid_request_error", "param": None, "code": None} if openai else sentence
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": to_json({"error": told})})
