"""One user and password for the whole app: asked for at the start, kept in a signed cookie, shown
by a small form; and a link that logs one page in without them, once.
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
"""After so long, a wrong password counts no more."""
WRONG_OF_ONE, WRONG_OF_ALL = 10, 100
"""Wrong passwords of one address, and of all together, after which none is looked at any more."""


class Login:
    """Checks a user and password, and issues and verifies the cookie that stands for them.

    The signing key lies in `key_path` (created on first use, readable by the owner only), so that a
    restart logs nobody out; it is mixed with the password, so that a new password logs everybody
    out.
    """

    def __init__(self, user: str, password: str, key_path: Path):
        self._user, self._password = user, password
        salt = f"{user}:{password}".encode()
        self._key = hmac.new(_read_or_create_key(key_path), salt, hashlib.sha256).digest()
        self.link_token = secrets.token_urlsafe(24)
        """Of the link that logs in once; new with each server."""
        self._link_used = threading.Lock()

    def redeem(self, token: str) -> bool:
        """Whether `token` is that of the link, and this its first use."""
        right = hmac.compare_digest(token.encode(), self.link_token.encode())
        return right and self._link_used.acquire(blocking=False)

    def set_cookie(self, secure: bool) -> str:
        """A Set-Cookie header that logs in. secure: the page came by https."""
        return (
            f"{COOKIE_NAME}={self.new_cookie()}; Max-Age={COOKIE_SECONDS}; Path=/; HttpOnly; "
            "SameSite=lax" + ("; Secure" if secure else "")
        )

    def accepts(self, user: str, password: str) -> bool:
        same_user = hmac.compare_digest(user.encode(), self._user.encode())
        same_password = hmac.compare_digest(password.encode(), self._password.encode())
        return same_user and same_password

    def new_cookie(self, now: float | None = None) -> str:
        """The cookie's value: when it expires, and the signature of that."""
        expires = str(int((time.time() if now is None else now) + COOKIE_SECONDS))
        return f"{expires}.{self._sign(expires)}"

    def accepts_cookie(self, header: str | None, now: float | None = None) -> bool:
        """Whether the request's Cookie header carries a valid, unexpired cookie of ours."""
        try:
            morsel = SimpleCookie(header or "").get(COOKIE_NAME)
        except CookieError:
            return False
        expires, _, signature = (morsel.value if morsel else "").partition(".")
        if not expires.isdecimal() or not signature.isascii():
            return False
        if not hmac.compare_digest(signature, self._sign(expires)):
            return False
        return int(expires) > (time.time() if now is None else now)

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


class Attempts:
    """Wrong passwords of the last minute, so that nobody gets to guess many."""

    def __init__(self) -> None:
        self._wrong: deque[tuple[float, str]] = deque()

    def are_too_many(self, address: str, now: float) -> bool:
        while self._wrong and self._wrong[0][0] <= now - FORGOTTEN_SECONDS:
            self._wrong.popleft()
        own = sum(other == address for _, other in self._wrong)
        return own >= WRONG_OF_ONE or len(self._wrong) >= WRONG_OF_ALL

    def note(self, address: str, now: float) -> None:
        self._wrong.append((now, address))


def resolve_login(login: bool | str | None, host: str, key_path: Path) -> Login | None:
    """The login that was asked for: `login` is "user:password", True (ask in the terminal) or
    False/None (none, unless the environment has RAMSTREAM_LOGIN). Raises RamstreamError when `host`
    can be reached by others and none is set.
    """
    text = login if isinstance(login, str) else os.environ.get(LOGIN_VARIABLE, "")
    if not text and login is True:
        try:
            text = f"{input('User: ').strip()}:{getpass.getpass('Password: ')}"
        except EOFError:
            raise RamstreamError(
                "--login: there is no terminal to ask for a user and password; set the environment "
                f"variable {LOGIN_VARIABLE} to user:password."
            ) from None
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


def tls_options(certificate: Path, key: Path) -> dict[str, str]:
    """Uvicorn's arguments for https. Raises RamstreamError where the files are no certificate and
    its key.
    """
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if not path.is_file():
            raise RamstreamError(
                f"{option} {path}: there is no such file; give the path of a PEM file."
            )
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key, password=""
        )
    except (ssl.SSLError, OSError) as error:
        raise RamstreamError(
            f"--tls-cert {certificate}: this is no PEM certificate that belongs to the unencrypted "
            f"key {key} ({getattr(error, 'reason', None) or error})."
        ) from None
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def login_routes(login: Login) -> list[Route]:
    """GET and POST of the form."""
    attempts = Attempts()

    async def form(request: Request) -> Response:
        used = (
            "That link has been used, or is of an earlier start: log in."
            if LINK_USED in request.query_params
            else ""
        )
        return HTMLResponse(_page(_own_path(request.query_params.get("next", "/")), used))

    async def submit(request: Request) -> Response:
        fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
        user, password = fields.get("user", [""])[0], fields.get("password", [""])[0]
        target = _own_path(fields.get("next", ["/"])[0])
        address = request.client.host if request.client is not None else ""
        if attempts.are_too_many(
            address, time.monotonic()
        ):  # a right one is not looked at either: guesses come in parallel
            return HTMLResponse(
                _page(target, "Too many wrong passwords: wait a minute, then try again."),
                429,
                {"retry-after": str(FORGOTTEN_SECONDS)},
            )
        if not login.accepts(user, password):
            attempts.note(address, time.monotonic())
            await asyncio.sleep(WRONG_PASSWORD_SECONDS)
            return HTMLResponse(_page(target, "That user or password is wrong."), status_code=401)
        return RedirectResponse(
            target, 303, {"set-cookie": login.set_cookie(request.url.scheme == "https")}
        )

    return [Route(LOGIN_PATH, form, methods=["GET"]), Route(LOGIN_PATH, submit, methods=["POST"])]


def _own_path(text: str) -> str:
    """`text` when it is a path on this server, else the first page: a login never leads elsewhere."""
    return text if text.startswith("/") and not text.startswith(("//", "/\\")) else "/"


def _read_or_create_key(path: Path) -> bytes:
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
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(key)
    except OSError as error:
        raise RamstreamError(
            f"{path}: the key that signs logins cannot be written ({error.strerror})."
        ) from None
    return key


def _page(target: str, problem: str) -> str:
    note = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Log in – Ramstream</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root {{ color-scheme: light dark; --page: #f5f6f8; --card: #fff; --text: #1c2330; --line: #7b8494; --bad: #b3261e }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #11151c; --card: #1a202a; --text: #e8ebf0; --line: #7b8698; --bad: #ff9c94 }} }}
body {{ margin: 0; min-height: 100vh; display: grid; place-items: center; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }}
form {{ background: var(--card); padding: 28px 32px; border-radius: 12px; width: min(300px, 80vw) }}
h1 {{ font-size: 20px; margin: 0 0 16px }} label {{ display: block; margin: 12px 0 4px }} p {{ color: var(--bad) }}
input {{ width: 100%; box-sizing: border-box; padding: 9px 10px; font: inherit; border: 1px solid var(--line);
  border-radius: 8px; background: var(--page); color: inherit }}
button {{ margin-top: 20px; width: 100%; padding: 10px; font: inherit; font-weight: 600; border: 0; border-radius: 8px;
  background: #2257c9; color: #fff; cursor: pointer }}
</style></head><body><form method="post" action="{LOGIN_PATH}"><h1>Ramstream</h1>{note}
<input type="hidden" name="next" value="{html.escape(target, quote=True)}">
<label for="user">User</label><input id="user" name="user" autocomplete="username" required autofocus>
<label for="password">Password</label>
<input id="password" name="password" type="password" autocomplete="current-password" required>
<button>Log in</button></form></body></html>"""
