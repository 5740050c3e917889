"""Access control: Host, Origin and token are checked before a body is read; the size of bodies is limited.

* Host must be a loopback name (any name if the studio is reachable from other machines, where the token protects it).
  This prevents DNS rebinding: a page elsewhere whose host name resolves to this machine is refused.
* Origin, which browsers send with every request that can change something, must be that of the page. A request that
  the browser marks as cross-site is refused, unless it opens the page itself.
* The token, if one is set, is read from `Authorization: Bearer`, from a cookie, or once from `?token=` of the page.
* Every response has a content security policy: load only from here, no inline scripts, no framing.
"""

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glassformer.studio.encoding import to_json
from glassformer.studio.errors import TooLargeError
from glassformer.studio.settings import LOOPBACK, Settings

COOKIE = "glass-token"
UPLOAD = "/api/train/upload"
# plotly.js sets style attributes, so inline styles are allowed; inline scripts are not.
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


class SecurityMiddleware:
    """Pure ASGI middleware, so that event streams still receive `http.disconnect`."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the studio has no websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        refusal, cookie = self.refusal(scope, headers), self._cookie(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    sent.setdefault(name, value)
                sent.setdefault("cache-control", "no-store" if _is_api(scope["path"]) else "no-cache")
                if cookie:
                    sent.append("set-cookie", cookie)
            await send(message)

        limits = self.settings.limits
        limit = limits.upload_bytes if scope["path"] == UPLOAD else limits.body_bytes
        if refusal is None:
            length = headers.get("content-length", "0")
            if not (length.isascii() and length.isdigit()):
                refusal = (400, "Content-Length must be an integer.")
            elif int(length) > limit:
                refusal = (413, f"the body of {int(length):,} bytes exceeds the limit of {limit:,} bytes: send less.")
        if refusal is not None:
            await refuse(send_with_headers, *refusal, openai=scope["path"].startswith("/v1"))
            return
        await self.app(scope, _limit_body(receive, limit), send_with_headers)

    def refusal(self, scope: Scope, headers: Headers) -> tuple[int, str] | None:
        """Return the status and sentence for a request that is refused; None if it is accepted."""
        host = headers.get("host", "")
        name = _host_name(host)
        if name is None or (self.settings.is_local and name not in LOOPBACK):
            return 403, "the Host header is not an address of this studio: open it at http://127.0.0.1."
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return (
                403,
                "this request comes from another site: use the studio's own page, or a client that sends no Origin.",
            )
        path = scope["path"]
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and not (
            path == "/" and headers.get("sec-fetch-mode") == "navigate"
        ):
            return 403, "this request comes from another site: use the studio's own page."
        if _is_api(path) and not self._has_token(scope, headers):
            return 403, "the token is missing or wrong: open the page at the address that `glass serve` printed."
        return None

    def _has_token(self, scope: Scope, headers: Headers) -> bool:
        token = self.settings.token
        if token is None:
            return True
        scheme, _, token_sent = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(token_sent.strip(), token):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and _equal(cookie.value, token)

    def _cookie(self, scope: Scope) -> str | None:
        """Return the cookie to set for a client that opens the page with the right token."""
        token = self.settings.token
        if token is None or scope["path"] != "/":
            return None
        try:
            token_sent = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=20).get("token", [""])[0]
        except ValueError:  # too many fields
            return None
        return f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/" if _equal(token_sent, token) else None


def _equal(sent: str, token: str) -> bool:
    return hmac.compare_digest(sent.encode("utf-8", "replace"), token.encode())


def _is_api(path: str) -> bool:
    return path.startswith(("/api", "/v1"))


def _host_name(host: str) -> str | None:
    """Return the name in a Host header without its port; None if the header is not valid."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  (raises ValueError for an invalid port)
    except ValueError:
        return None
    return parts.hostname if parts.hostname and "@" not in host and not parts.path else None


def _limit_body(receive: Receive, limit: int) -> Receive:
    """Count the bytes of a body as they arrive: a chunked body has no Content-Length."""
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > limit:
                raise TooLargeError(f"the body exceeds the limit of {limit:,} bytes: send less.")
        return message

    return receive_limited


async def refuse(send: Send, status: int, sentence: str, openai: bool = False) -> None:
    """Send an error response."""
    error = {"message": sentence, "type": "invalid_request_error", "param": None, "code": None} if openai else sentence
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": to_json({"error": error})})
