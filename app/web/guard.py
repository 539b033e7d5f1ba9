"""The guard in front of every route: any web page can post to a local port, and Gradio's own routes
answer anyone.

Pure ASGI, outermost. A request passes when its Host is one of ours (400), it was not sent by a page
of another origin (403), its body is JSON, or that of the login form (415), it is small (413, 431;
408 when it does not arrive), and, where a login is set, it carries our cookie (401, or the login
form for a page). No web socket is served.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from app.web.login import LINK_USED, LOGIN_PATH, Login

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_SECONDS = 20.0
MOST_HEADERS, LARGEST_HEAD = 100, 32 << 10
"""Headers of a request, and their bytes; a browser sends some 20."""
LONGEST_LENGTH = 20
"""Digits of a Content-Length."""
FORM = "application/x-www-form-urlencoded"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})
READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

# Nothing is loaded from, or sent to, another machine; Gradio builds its templates with eval and
# inline styles.
CONTENT_SECURITY_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
SECURITY_HEADERS = [
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@dataclass(frozen=True)
class GuardPolicy:
    hosts: frozenset[str]
    """Names and addresses that the Host header may carry, without port, lower case."""

    any_address: bool = False
    """Also any literal IP address: right for a wildcard bind, since a rebinding attack needs a
    name.
    """

    login: Login | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_seconds: float = BODY_TIMEOUT_SECONDS

    @classmethod
    def for_bind(cls, host: str, login: Login | None) -> GuardPolicy:
        """The policy of a server bound to `host`."""
        names = set(LOOPBACK_HOSTS)
        if host in WILDCARD_HOSTS:
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        else:
            names.add(host.lower())
        return cls(frozenset(names), any_address=host in WILDCARD_HOSTS, login=login)


class Guard:
    """ASGI middleware; `policy` says who may pass."""

    def __init__(self, app: App, policy: GuardPolicy):
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _Headers(scope)
        if headers.are_too_many():
            await _respond(send, 431, "The head of the request is too large.")
            return
        refusal = self._refusal(scope, headers) or self._by_link(scope)
        if refusal is not None:
            await _respond(send, *refusal)
            return
        if scope["method"] not in READ_METHODS:
            body = await self._read_body(receive, headers)
            if isinstance(body, int):
                await _respond(
                    send,
                    body,
                    "The request is too large." if body == 413 else "The request never arrived.",
                )
                return
            receive = replayed(body, receive)
        await self.app(scope, receive, _with_security_headers(send))

    def _by_link(self, scope: Scope) -> tuple[int, str, str, str] | None:
        """Who is logged in already and opens the link goes on without the token in the address."""
        token = _link_token(scope)
        return None if token is None or self.policy.login is None else (303, "Logged in.", "/", "")

    def _refusal(self, scope: Scope, headers: _Headers) -> tuple | None:
        """Status and sentence (and the place to go instead, and a cookie) of a request that may not
        pass as it is.
        """
        hosts = headers.all("host")
        if len(hosts) != 1 or not self._is_our_host(hosts[0]):
            return (
                400,
                "Unknown Host: open the app under the address that it printed when it started.",
            )
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != hosts[0].lower():
            return 403, "Refused: this request was sent by a page of another origin."
        site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
        reads = scope["method"] in READ_METHODS
        if site == "cross-site" and not (reads and mode == "navigate"):
            return 403, "Refused: this request was sent by a page of another site."
        path = scope["path"]
        if not reads:
            kind = (headers.get("content-type") or "").partition(";")[0].strip().lower()
            if kind != (FORM if self._is_login_post(scope) else "application/json"):
                return 415, "Refused: only JSON is accepted here."
        login = self.policy.login
        if (
            login is not None
            and path != LOGIN_PATH
            and not login.accepts_cookie(headers.get("cookie"))
        ):
            token = _link_token(scope)
            if token is not None:
                if login.redeem(token):
                    return 303, "Logged in.", "/", login.set_cookie(scope.get("scheme") == "https")
                return 303, "Log in first.", f"{LOGIN_PATH}?{LINK_USED}=1"
            wants_page = scope["method"] == "GET" and "text/html" in (headers.get("accept") or "")
            if wants_page and path == "/":
                query = scope.get("query_string", b"").decode("latin-1")
                return (
                    303,
                    "Log in first.",
                    f"{LOGIN_PATH}?next={quote('/?' + query if query else '/')}",
                )
            return 401, "Log in first."
        return None

    def _is_login_post(self, scope: Scope) -> bool:
        return (
            self.policy.login is not None
            and scope["path"] == LOGIN_PATH
            and scope["method"] == "POST"
        )

    def _is_our_host(self, header: str) -> bool:
        try:
            parts = urlsplit(f"//{header}")
            name, _ = parts.hostname, parts.port
        except ValueError:
            return False
        if not name or parts.path or parts.query or parts.fragment or parts.username is not None:
            return False
        if name in self.policy.hosts:
            return True
        return self.policy.any_address and _is_address(name)

    async def _read_body(self, receive: Receive, headers: _Headers) -> bytes | int:
        """The whole body, or the status of its refusal. Bodies are small here, so that counting is
        reading.
        """
        limit = self.policy.max_body_bytes
        declared = headers.get("content-length") or "0"
        if not declared.isdecimal() or len(declared) > LONGEST_LENGTH or int(declared) > limit:
            return 413
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.policy.body_timeout_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return 408
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limit:
                        return 413
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            return 408


def _netloc(origin: str) -> str | None:
    """Host and port of an Origin header, None for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _link_token(scope: Scope) -> str | None:
    """The token of the link that logs in once, where that was opened."""
    if scope["method"] != "GET" or scope["path"] != "/":
        return None
    return parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [None])[0]


class _Headers:
    def __init__(self, scope: Scope):
        self._pairs = [(name.lower(), value) for name, value in scope.get("headers", [])]

    def are_too_many(self) -> bool:
        return (
            len(self._pairs) > MOST_HEADERS
            or sum(len(name) + len(value) for name, value in self._pairs) > LARGEST_HEAD
        )

    def all(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self._pairs if key == name.encode()]

    def get(self, name: str) -> str | None:
        values = self.all(name)
        return ", ".join(values) if values else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def replayed(body: bytes, receive: Receive) -> Receive:
    """What an application receives when the body of its request was read already."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _with_security_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *SECURITY_HEADERS]
        await send(message)

    return guarded


async def _respond(
    send: Send, status: int, sentence: str, location: str | None = None, cookie: str = ""
) -> None:
    body = json.dumps({"error": sentence}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *SECURITY_HEADERS,
    ]
    if location is not None:
        headers.append((b"location", location.encode("latin-1")))
    if cookie:
        headers.append((b"set-cookie", cookie.encode("latin-1")))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
