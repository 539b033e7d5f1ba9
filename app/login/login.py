"""The whole app is protected by one user name and password.

The server takes them when it starts. A person enters them in a small form, after which a cookie
keeps the browser logged in. A link that works once logs a browser in without them.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import ipaddress
import os
import secrets
import ssl
import threading
from pathlib import Path
from typing import Any

from app.login.asgi import Scope
from app.login.browser_words import browser_words
from app.login.clients import client_of, header_values, port_of
from app.login.cookies import cookie_values, login_cookie
from app.login.login_sessions import SESSION_SECONDS, LoginSession, LoginSessions
from engine.errors import RamstreamError

LOGIN_PATH = "/login"
LOGIN_VARIABLE = "RAMSTREAM_LOGIN"
LINK_USED = "link_used"
SESSION_KEY = "ramstream.session"
"""The guard leaves the session of a request under this key of its scope."""


class Login:
    """Checks a user name and password, and begins and finds the sessions of who is logged in.

    The key of the sessions is in the file `key_path`, which is created on first use and which only
    its owner can read; the sessions are in a file beside it. So a restart logs nobody out. The key
    is mixed with the password, so that a new password logs everybody out.
    """

    def __init__(self, user: str, password: str, key_path: Path, port: int = 0):
        """Takes the port on which the server listens: servers on other ports may keep their
        sessions in the same folder.
        """
        self._user, self._password = user, password
        salt = f"{user}:{password}".encode()
        key = hmac.new(_read_or_create_key(key_path), salt, hashlib.sha256).digest()
        self.sessions = LoginSessions(key_path.with_name(f".login.sessions-{port}.json"), key)
        self.link_token = secrets.token_urlsafe(24)
        """The one-time login link carries this token; each server makes a new one."""
        self._link_used = threading.Lock()
        """The first page that opens the link acquires this lock, which is never released: of two
        pages that open it at the same moment, only one is logged in.
        """

    @property
    def user(self) -> str:
        """Returns the name of the only user."""
        return self._user

    def redeem(self, token: str) -> bool:
        """Consumes the link's token. Returns whether it was correct and still unused."""
        is_right = hmac.compare_digest(token.encode(), self.link_token.encode())
        return is_right and self._link_used.acquire(blocking=False)

    def accepts(self, user: str, password: str) -> bool:
        # Both are compared in constant time, so that the response time reveals nothing about
        # either.
        same_user = hmac.compare_digest(user.encode(), self._user.encode())
        same_password = hmac.compare_digest(password.encode(), self._password.encode())
        return same_user and same_password

    def begin(self, scope: Scope) -> str:
        """Begins a session for the browser that sent a request. A session that the browser had
        before ends.

        Returns the Set-Cookie header that logs the browser in.
        """
        before = self.session_of(scope)
        if before is not None:
            self.sessions.end(before.name)
        agents = header_values(scope, b"user-agent")
        browser = browser_words(agents[0].decode("latin-1") if agents else "")
        token = self.sessions.begin(client_of(scope).address, browser)
        return _set_cookie(scope, token, SESSION_SECONDS)

    def session_of(self, scope: Scope) -> LoginSession | None:
        """Returns the session that a request belongs to, or None if it has no valid cookie of this
        server.
        """
        known = scope.get(SESSION_KEY)
        if isinstance(known, LoginSession):
            return known
        name = login_cookie(port_of(scope))
        for token in cookie_values(header_values(scope, b"cookie"), name):
            session = self.sessions.find(token)
            if session is not None:
                return session
        return None


def _set_cookie(scope: Scope, token: str, seconds: int) -> str:
    """Returns a Set-Cookie header for the address under which the browser has reached the app."""
    header = (
        f"{login_cookie(port_of(scope))}={token}; Max-Age={seconds}; Path=/; HttpOnly; SameSite=lax"
    )
    return f"{header}; Secure" if client_of(scope).scheme == "https" else header


def forgotten_cookie(scope: Scope) -> str:
    """Returns a Set-Cookie header with which a browser forgets its login."""
    return _set_cookie(scope, "", 0)


def resolve_login(
    login: bool | str | None, host: str, key_path: Path, port: int = 0
) -> Login | None:
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
        return Login(user, password, key_path, port)
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
