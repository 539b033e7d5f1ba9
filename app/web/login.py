"""The whole app is protected by one user name and password.

The server takes them when it starts. A person enters them in a small form, after which a signed
cookie keeps the page logged in. A link that works once logs a page in without them.
"""

from __future__ import annotations

import asyncio
import getpass
import hashlib
import hmac
import html
import ipaddress
import os
import secrets
import ssl
import threading
import time
from collections import deque
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from engine.errors import RamstreamError

LOGIN_PATH = "/login"
LOGIN_VARIABLE = "RAMSTREAM_LOGIN"
COOKIE_NAME = "ramstream_login"
LINK_USED = "link_used"
COOKIE_SECONDS = 14 * 24 * 3600
WRONG_PASSWORD_SECONDS = 0.5
FORGOTTEN_SECONDS = 60
"""A wrong password is remembered for this many seconds."""
WRONG_OF_ONE, WRONG_OF_ALL = 10, 100
"""After this many wrong passwords from one address, or from all addresses together, no further
password is checked until some are forgotten.
"""


class Login:
    """Checks a user name and password, and issues and verifies the cookie that proves a login.

    The signing key is in the file `key_path`, which is created on first use and which only its
    owner can read. So a restart logs nobody out. The key is mixed with the password, so that a new
    password logs everybody out.
    """

    def __init__(self, user: str, password: str, key_path: Path):
        self._user, self._password = user, password
        salt = f"{user}:{password}".encode()
        self._key = hmac.new(_read_or_create_key(key_path), salt, hashlib.sha256).digest()
        self.link_token = secrets.token_urlsafe(24)
        """The one-time login link carries this token; each server makes a new one."""
        self._link_used = threading.Lock()
        """The first page that opens the link acquires this lock, which is never released: of two
        pages that open it at the same moment, only one is logged in.
        """

    def redeem(self, token: str) -> bool:
        """Consumes the link's token. Returns whether it was correct and still unused."""
        is_right = hmac.compare_digest(token.encode(), self.link_token.encode())
        return is_right and self._link_used.acquire(blocking=False)

    def set_cookie(self, secure: bool) -> str:
        """Returns a Set-Cookie header that logs a page in; `secure` is whether it uses https."""
        header = (
            f"{COOKIE_NAME}={self.new_cookie()}; Max-Age={COOKIE_SECONDS}; Path=/; HttpOnly; "
            "SameSite=lax"
        )
        return f"{header}; Secure" if secure else header

    def accepts(self, user: str, password: str) -> bool:
        # Both are compared in constant time, so that the response time reveals nothing about
        # either.
        same_user = hmac.compare_digest(user.encode(), self._user.encode())
        same_password = hmac.compare_digest(password.encode(), self._password.encode())
        return same_user and same_password

    def new_cookie(self, now: float | None = None) -> str:
        """Returns the cookie's value: its expiry time and the signature of that."""
        now = time.time() if now is None else now
        expires = str(int(now + COOKIE_SECONDS))
        return f"{expires}.{self._sign(expires)}"

    def accepts_cookie(self, header: str | None, now: float | None = None) -> bool:
        """Returns whether a request's Cookie header carries a valid cookie of this server."""
        try:
            morsel = SimpleCookie(header or "").get(COOKIE_NAME)
        except CookieError:
            return False
        value = morsel.value if morsel else ""
        expires, _, signature = value.partition(".")
        if not expires.isdecimal() or not signature.isascii():
            return False
        if not hmac.compare_digest(signature, self._sign(expires)):
            return False
        return int(expires) > (time.time() if now is None else now)

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


class Attempts:
    """Remembers the wrong passwords of the last minute, to limit the number of guesses."""

    def __init__(self) -> None:
        self._wrong: deque[tuple[float, str]] = deque()

    def are_too_many(self, address: str, now: float) -> bool:
        while self._wrong and self._wrong[0][0] <= now - FORGOTTEN_SECONDS:
            self._wrong.popleft()
        of_this_one = sum(other == address for _, other in self._wrong)
        return of_this_one >= WRONG_OF_ONE or len(self._wrong) >= WRONG_OF_ALL

    def note(self, address: str, now: float) -> None:
        self._wrong.append((now, address))


def resolve_login(login: bool | str | None, host: str, key_path: Path) -> Login | None:
    """Returns the requested login, or None where none was requested.

    `login` is "user:password", True (ask in the terminal), or False or None (no login, unless the
    environment has RAMSTREAM_LOGIN). Raises RamstreamError if others can reach `host` and no login
    is set.
    """
    text = login if isinstance(login, str) else os.environ.get(LOGIN_VARIABLE, "")
    if not text and login is True:
        text = _ask_in_terminal()
    if text:
        user, colon, password = text.partition(":")
        if not colon or not user or not password:
            raise RamstreamError(f"{LOGIN_VARIABLE}: a login is user:password, with neither empty.")
        return Login(user, password, key_path)
    if not is_loopback(host):
        raise RamstreamError(
            f"--host {host}: other machines could reach this address, so it needs a login; add "
            f"--login or set {LOGIN_VARIABLE}, or stay on 127.0.0.1."
        )
    return None


def _ask_in_terminal() -> str:
    """Returns user:password as typed in the terminal. Raises RamstreamError without a terminal."""
    try:
        return f"{input('User: ').strip()}:{getpass.getpass('Password: ')}"
    except EOFError:
        raise RamstreamError(
            "--login: there is no terminal to ask for a user and password; set the environment "
            f"variable {LOGIN_VARIABLE} to user:password."
        ) from None


def tls_options(certificate: Path, key: Path) -> dict[str, Any]:
    """Returns uvicorn's arguments for https.

    Raises RamstreamError unless the files are a certificate and its key.
    """
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not path.is_file():
            raise RamstreamError(
                f"{option} {path}: there is no such file; give the path of a PEM file."
            )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # The empty password keeps OpenSSL from asking for one in the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise RamstreamError(
            f"--tls-cert {certificate}: this is not a PEM certificate that matches the unencrypted "
            f"key {key} ({getattr(error, 'reason', None) or error})."
        ) from None
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def login_routes(login: Login) -> list[Route]:
    """Returns the GET and POST routes of the login form."""
    attempts = Attempts()

    async def form(request: Request) -> Response:
        problem = ""
        if LINK_USED in request.query_params:
            problem = (
                "That link was already used, or the server was started again since. Please log in."
            )
        return HTMLResponse(_page(_own_path(request.query_params.get("next", "/")), problem))

    async def submit(request: Request) -> Response:
        fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
        user, password = fields.get("user", [""])[0], fields.get("password", [""])[0]
        target = _own_path(fields.get("next", ["/"])[0])
        address = request.client.host if request.client is not None else ""
        # After too many wrong passwords, even a correct one is refused: otherwise guesses sent in
        # parallel could still succeed.
        if attempts.are_too_many(address, time.monotonic()):
            return HTMLResponse(
                _page(target, "Too many wrong passwords: wait a minute, then try again."),
                429,
                {"retry-after": str(FORGOTTEN_SECONDS)},
            )
        if not login.accepts(user, password):
            attempts.note(address, time.monotonic())
            await asyncio.sleep(WRONG_PASSWORD_SECONDS)
            return HTMLResponse(_page(target, "That user or password is wrong."), status_code=401)
        cookie = login.set_cookie(request.url.scheme == "https")
        return RedirectResponse(target, 303, {"set-cookie": cookie})

    return [Route(LOGIN_PATH, form, methods=["GET"]), Route(LOGIN_PATH, submit, methods=["POST"])]


def _own_path(text: str) -> str:
    r"""Returns `text` when it is a path on this server, else the first page.

    A login never redirects elsewhere: browsers take a leading // or /\ for another server's
    address.
    """
    is_own = text.startswith("/") and not text.startswith(("//", "/\\"))
    return text if is_own else "/"


def _read_or_create_key(path: Path) -> bytes:
    """Returns the key that signs logins. A truncated key file gets a new key."""
    try:
        key = path.read_bytes()
        if len(key) >= 32:
            return key
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RamstreamError(
            f"{path}: the key that signs logins cannot be read ({error.strerror})."
        ) from None
    key = secrets.token_bytes(32)
    try:
        # The file is created with its final mode, so that it is never readable by others.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
    except OSError as error:
        raise RamstreamError(
            f"{path}: the key that signs logins cannot be written ({error.strerror})."
        ) from None
    return key


# A backslash at the end of a line joins it to the next one.
_STYLE = """\
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --text: #1c2330; \
--line: #7b8494; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --page: #11151c; --card: #1a202a; --text: #e8ebf0; --line: #7b8698; --bad: #ff9c94 } }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; \
background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
form { background: var(--card); padding: 28px 32px; border-radius: 12px; width: min(300px, 80vw) }
h1 { font-size: 20px; margin: 0 0 16px } label { display: block; margin: 12px 0 4px } \
p { color: var(--bad) }
input { width: 100%; box-sizing: border-box; padding: 9px 10px; font: inherit; \
border: 1px solid var(--line);
  border-radius: 8px; background: var(--page); color: inherit }
button { margin-top: 20px; width: 100%; padding: 10px; font: inherit; font-weight: 600; \
border: 0; border-radius: 8px;
  background: #2257c9; color: #fff; cursor: pointer }
"""


def _page(target: str, problem: str) -> str:
    """Returns the form, which leads to `target`. If there is a `problem`, it is shown above the
    form.
    """
    note = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">\
<title>Log in – Ramstream</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
{_STYLE}</style></head><body><form method="post" action="{LOGIN_PATH}"><h1>Ramstream</h1>{note}
<input type="hidden" name="next" value="{html.escape(target, quote=True)}">
<label for="user">User</label>\
<input id="user" name="user" autocomplete="username" required autofocus>
<label for="password">Password</label>
<input id="password" name="password" type="password" autocomplete="current-password" required>
<button>Log in</button></form></body></html>"""
