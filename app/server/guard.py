"""The guard protects every route: any web page can post to a local port, and Gradio's own routes do
not check who asks.

It is pure ASGI and the outermost layer. A request passes if all of these conditions hold; otherwise
the guard answers with the status in brackets:

- Its head is small (431).
- Its Host is one of ours (400).
- It was not sent by a page of another origin (403).
- Its body is JSON, that of the login form, or an upload (415).
- It comes from a program of the account that runs the server, or it carries our cookie; where a
  password is set, it carries our cookie (401, or the login page for a page). An answer that
  continues for long ends with the login of that cookie.
- If it is for OpenAI's API, it carries our key in place of all these (401).
- Its body is small (413) and arrives in time (408). Only an upload has other limits, which its
  route checks while the bytes arrive.

Web sockets are not served. What is behind the guard sees no cookies, and of the headers on
forwarding only what a named proxy says.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import socket
from dataclasses import dataclass
from urllib.parse import parse_qs, quote, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.api_key import ApiKey, api_error, is_api
from app.server.clients import Proxies, client_of
from app.server.links import token_in
from app.server.login import LINK_USED, LOGIN_PATH, SESSION_KEY, Login
from app.server.login_sessions import LoginSession
from app.server.login_streams import answer_while_logged_in

MAX_BODY_BYTES = 1 << 20
BODY_TIMEOUT_SECONDS = 20.0
MOST_HEADERS, LARGEST_HEAD = 100, 32 << 10
"""Largest number of headers of a request, and of their bytes together with its address. A browser
sends about 20 headers. Cookies do not count: a browser sends all those of the host, and those of
other programs must not shut us out.
"""
LARGEST_FORM = 16 << 10
"""Largest number of bytes of the login form, which anybody may send."""
LONGEST_LENGTH = 20
"""Largest number of digits of a Content-Length."""
NO_PROXY = Proxies()
FORM = "application/x-www-form-urlencoded"
FILE = "application/octet-stream"
UPLOAD_PATH = re.compile(r"/api/uploads/[0-9a-f]{16}")
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::", ""})
READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

# Nothing is loaded from another machine, or sent to one. Gradio builds its templates with eval and
# inline styles, so both are allowed.
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
    """Which requests pass the guard, and how large their bodies may be."""

    hosts: frozenset[str]
    """Names and addresses that the Host header may carry, here in lower case and without a port."""

    any_address: bool = False
    """Whether the Host header may also carry any literal IP address. This is safe for a server that
    listens on all addresses, since a DNS rebinding attack needs a name.
    """

    login: Login | None = None
    api_key: ApiKey | None = None
    """Key for OpenAI's API; without one, nobody may use it."""
    proxies: Proxies = NO_PROXY
    """Proxies that the user has named; any Host passes that one of them lets through."""

    max_body_bytes: int = MAX_BODY_BYTES
    body_timeout_seconds: float = BODY_TIMEOUT_SECONDS

    @classmethod
    def for_bind(
        cls,
        host: str,
        login: Login | None,
        proxies: Proxies = NO_PROXY,
        api_key: ApiKey | None = None,
    ) -> GuardPolicy:
        """Returns the policy of a server bound to `host`, which `proxies` may stand before."""
        names = set(LOOPBACK_HOSTS)
        if host in WILDCARD_HOSTS:
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        else:
            names.add(host.lower())
        return cls(
            frozenset(names),
            any_address=host in WILDCARD_HOSTS,
            login=login,
            api_key=api_key,
            proxies=proxies,
        )


class Guard:
    """Lets requests pass that its policy allows, and refuses all others."""

    def __init__(self, app: ASGIApp, policy: GuardPolicy):
        self.app = app
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope = self.policy.proxies.seen(scope)
        headers = _Headers(scope)
        refusal = self._refusal_before_login(scope, headers)
        session = None
        if refusal is None and is_api(scope):
            refusal = self._refusal_without_key(scope)
        elif refusal is None and self.policy.login is not None:
            session = self.policy.login.session_of(scope)
            refusal = self._refusal_of_stranger(self.policy.login, session, scope, headers)
        if refusal is None and not _reads(scope) and not _is_upload(scope):
            body = await self._read_body(receive, headers, self._largest_body(scope))
            if isinstance(body, _Refusal):
                refusal = body
            else:
                receive = replayed(body, receive)
        if refusal is not None:
            await refusal.send(send, is_api(scope))
            return
        await self._pass_on(session, _known(scope, session), receive, send)

    async def _pass_on(
        self, session: LoginSession | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Lets the app answer a request, as long as its session lasts."""
        send = _with_security_headers(send)
        if session is None or self.policy.login is None:
            await self.app(scope, receive, send)
            return
        self.policy.login.sessions.saw(session, client_of(scope).address)
        if not _reads(scope) and not _is_upload(scope):
            # What was asked for in time is done, and its answer is short. Logging out is among it.
            await self.app(scope, receive, send)
        elif not await answer_while_logged_in(session, self.app, scope, receive, send):
            await _Refusal(401, "Log in first.").send(send)

    def _refusal_before_login(self, scope: Scope, headers: _Headers) -> _Refusal | None:
        """Returns the refusal of a request that may not pass, no matter who sent it, or None."""
        if headers.are_too_many():
            return _Refusal(431, "The head of the request is too large.")
        return (
            self._refusal_of_host(scope, headers)
            or self._refusal_of_origin(scope, headers)
            or self._refusal_of_type(scope, headers)
        )

    def _refusal_of_host(self, scope: Scope, headers: _Headers) -> _Refusal | None:
        """Refuses a Host that is none of ours, since a DNS name of another site may lead here.

        A proxy decides itself which hosts it serves, and it is named only where a login is set. A
        page of another site under its own name has no cookie of ours.
        """
        hosts = headers.all("host")
        if len(hosts) == 1 and self._is_our_host(hosts[0], client_of(scope).is_proxied):
            return None
        return _Refusal(
            400, "Unknown Host: open the app under the address that it printed when it started."
        )

    def _is_our_host(self, header: str, is_proxied: bool) -> bool:
        try:
            parts = urlsplit(f"//{header}")
            name, _ = parts.hostname, parts.port  # an invalid port raises here
        except ValueError:
            return False
        if not name or parts.path or parts.query or parts.fragment or parts.username is not None:
            return False
        if name in self.policy.hosts or is_proxied:
            return True
        return self.policy.any_address and _is_address(name)

    def _refusal_of_origin(self, scope: Scope, headers: _Headers) -> _Refusal | None:
        """Refuses requests sent by pages of another origin or site. Opening a link on such a page
        is allowed.
        """
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != headers.all("host")[0].lower():
            return _Refusal(403, "Refused: this request was sent by a page of another origin.")
        is_link = _reads(scope) and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") == "cross-site" and not is_link:
            return _Refusal(403, "Refused: this request was sent by a page of another site.")
        return None

    def _refusal_of_type(self, scope: Scope, headers: _Headers) -> _Refusal | None:
        """Refuses a body of any type but ours.

        A page of another site can send a form without a preflight request, but not JSON.
        """
        if _reads(scope):
            return None
        sent = (headers.get("content-type") or "").partition(";")[0].strip().lower()
        if _is_upload(scope):
            return None if sent == FILE else _Refusal(415, f"Refused: an upload is {FILE}.")
        expected = FORM if self._is_login_post(scope) else "application/json"
        return None if sent == expected else _Refusal(415, "Refused: only JSON is accepted here.")

    def _is_login_post(self, scope: Scope) -> bool:
        return (
            self.policy.login is not None
            and self.policy.login.has_password
            and scope["path"] == LOGIN_PATH
            and scope["method"] == "POST"
        )

    def _is_login_page(self, scope: Scope) -> bool:
        """Returns whether a request is for what anybody may see: the login page, and its form."""
        is_read = scope["path"] == LOGIN_PATH and scope["method"] in ("GET", "HEAD")
        return is_read or self._is_login_post(scope)

    def _refusal_of_stranger(
        self, login: Login, session: LoginSession | None, scope: Scope, headers: _Headers
    ) -> _Refusal | None:
        """Refuses clients that are neither the owner's nor logged in.

        The one-time login link redirects to the page, which removes its token from the address. It
        does so for clients that are already in, too.
        """
        token = _link_token(scope)
        if self._is_login_page(scope) or session is not None or login.is_owners(scope):
            return None if token is None else _Refusal(303, "Logged in.", "/")
        if token is not None:
            if login.redeem(token):
                return _Refusal(303, "Logged in.", "/", login.begin(scope))
            return _Refusal(303, "Log in first.", f"{LOGIN_PATH}?{LINK_USED}=1")
        if _asks_for_page(scope, headers):
            query = scope.get("query_string", b"").decode("latin-1")
            wanted = "/?" + query if query else "/"
            return _Refusal(303, "Log in first.", f"{LOGIN_PATH}?next={quote(wanted)}")
        return _Refusal(401, login.refusal(scope))

    def _refusal_without_key(self, scope: Scope) -> _Refusal | None:
        """Refuses programs without the key, whatever else they have."""
        key = self.policy.api_key
        if key is not None and key.is_in(scope):
            return None
        return _Refusal(
            401,
            "The API key is missing or wrong; the Export page of the run that is served has it.",
        )

    def _largest_body(self, scope: Scope) -> int:
        largest = self.policy.max_body_bytes
        return min(largest, LARGEST_FORM) if self._is_login_post(scope) else largest

    async def _read_body(self, receive: Receive, headers: _Headers, limit: int) -> bytes | _Refusal:
        """Returns the whole body, or the refusal of one that is larger than `limit` or does not
        arrive in time.

        Bodies are small here, so the guard reads each one whole to count its bytes.
        """
        too_large = _Refusal(413, "The request is too large.")
        never_arrived = _Refusal(408, "The request never arrived.")
        declared = headers.get("content-length") or "0"
        if not declared.isdecimal() or len(declared) > LONGEST_LENGTH or int(declared) > limit:
            return too_large
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.policy.body_timeout_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return never_arrived
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > limit:
                        return too_large
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            return never_arrived


@dataclass(frozen=True)
class _Refusal:
    """Answer sent in place of the requested one; it may redirect."""

    status: int
    sentence: str
    location: str | None = None
    cookie: str = ""

    async def send(self, send: Send, is_api: bool = False) -> None:
        """Sends this answer, to a program in the form of OpenAI's API."""
        error = api_error(self.status, self.sentence) if is_api else {"error": self.sentence}
        body = json.dumps(error).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            *SECURITY_HEADERS,
        ]
        if self.location is not None:
            headers.append((b"location", self.location.encode("latin-1")))
        if self.cookie:
            headers.append((b"set-cookie", self.cookie.encode("latin-1")))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _reads(scope: Scope) -> bool:
    return scope["method"] in READ_METHODS


def _is_upload(scope: Scope) -> bool:
    """Returns whether a request sends a file, which is streamed to its route."""
    return scope["method"] == "PUT" and UPLOAD_PATH.fullmatch(scope["path"]) is not None


def _asks_for_page(scope: Scope, headers: _Headers) -> bool:
    accepts_page = "text/html" in (headers.get("accept") or "")
    return scope["method"] == "GET" and scope["path"] == "/" and accepts_page


def _netloc(origin: str) -> str | None:
    """Returns the host and port of an Origin header, or None if the header is invalid."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _link_token(scope: Scope) -> str | None:
    """Returns the token of the one-time login link, or None if another address was requested."""
    if scope["method"] != "GET" or scope["path"] != "/":
        return None
    query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
    tokens = query.get("token")
    return None if tokens is None else token_in(tokens[0])


def _known(scope: Scope, session: LoginSession | None) -> Scope:
    """Returns a scope that names the session of its request, without any cookie.

    Nothing behind the guard needs cookies: ours would be a secret in too many hands, and those of
    other programs are theirs.
    """
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"cookie"]
    return {**scope, "headers": headers, SESSION_KEY: session}


class _Headers:
    """Headers of a request by lower-case name, but for cookies; a name may occur more than once."""

    def __init__(self, scope: Scope):
        pairs = [(name.lower(), value) for name, value in scope.get("headers", [])]
        self._pairs = [(name, value) for name, value in pairs if name != b"cookie"]
        self._address = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))

    def are_too_many(self) -> bool:
        size = self._address + sum(len(name) + len(value) for name, value in self._pairs)
        return len(self._pairs) > MOST_HEADERS or size > LARGEST_HEAD

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
    """Returns a `receive` that first returns `body`, for a request whose body was already read."""
    is_sent = False

    async def again() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _with_security_headers(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *SECURITY_HEADERS]
        await send(message)

    return guarded
