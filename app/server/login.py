"""Who may use the app: the account that runs it, who has its password, and browsers that were
let in by a link.

- A server without a password knows the programs of its own account by their connections
  (`app.server.peers`); all others need a link that works once.
- A server with a password asks everybody for it. A link that works once does instead.

From then on a cookie keeps the browser logged in.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import hmac
import ipaddress
import os
import pwd
import secrets
import ssl
import stat
import sys
from pathlib import Path
from typing import Any

from starlette.types import Scope

from app.server.browser_name import browser_name
from app.server.clients import client_of, header_values, port_of
from app.server.cookies import cookie_values, login_cookie
from app.server.links import Links, command_for_others
from app.server.login_sessions import (
    KEY_NOT_KEPT,
    KEY_REPLACED,
    SESSION_SECONDS,
    LoginSession,
    LoginSessions,
)
from app.server.peers import Account, peer_account
from engine import safe_files
from engine.errors import RamstreamError

LOGIN_PATH = "/login"
LOGIN_VARIABLE = "RAMSTREAM_LOGIN"
LINK_USED = "link_used"
SESSION_KEY = "ramstream.session"
"""Key of a request's scope under which the guard leaves its session."""
OPEN_TO_ALL = (
    "--no-login: whoever reaches this port is the owner here, every account of this machine "
    "included, and whoever comes through a tunnel, a proxy or a container: they can start, delete, "
    "export and push runs and read any file that this account can read."
)
_KEY_BYTES = 32


class Login:
    """Decides who may use the app, and begins and finds the sessions of who is logged in.

    The key of the sessions is in the file `key_path`, which is created on first use and which only
    its owner can read; the sessions are in a file beside it. So a restart logs nobody out. The key
    is mixed with the password, so that a new password logs everybody out.
    """

    def __init__(self, user: str, password: str, key_path: Path, port: int = 0):
        """Takes the port on which the server listens: servers on other ports may keep their
        sessions in the same folder. An empty password is none.
        """
        self._user, self._password = user, password
        salt = f"{user}:{password}".encode()
        kept, fault = self._key(key_path)
        key = hmac.new(kept, salt, hashlib.sha256).digest()
        sessions = key_path.with_name(f".login.sessions-{port}.json")
        self.sessions = LoginSessions(sessions, key, fault)
        self.links = Links()
        self.link_token = self.links.make()
        """Token of the link that is printed at the start."""

    @classmethod
    def without_password(cls, key_path: Path, port: int = 0) -> Login:
        """Returns the login of a server whose own account needs none."""
        return cls("", "", key_path, port)

    def _key(self, path: Path) -> tuple[bytes, str]:
        """Returns the key of the sessions, and what was wrong with its file, as a sentence for a
        browser; the terminal shows it, too. Without a password, a folder in which none can be kept
        is no reason not to start: a restart then ends the sessions.
        """
        try:
            key, replaced = _read_or_create_key(path)
        except RamstreamError as error:
            if self.has_password:
                raise
            print(f"ramstream: {error} After a restart, log in again.", file=sys.stderr)
            return secrets.token_bytes(_KEY_BYTES), KEY_NOT_KEPT
        if not replaced:
            return key, ""
        print(
            f"ramstream: {path}: the key that signs logins {replaced} and was replaced, so log in "
            "again.",
            file=sys.stderr,
        )
        return key, KEY_REPLACED

    @property
    def has_password(self) -> bool:
        """Whether everybody is asked for a password, the server's own account included."""
        return bool(self._password)

    @property
    def user(self) -> str:
        """The name of the only user: without a password, that of the server's account."""
        if self._user:
            return self._user
        try:
            return pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            return str(os.geteuid())

    def account_of(self, scope: Scope) -> Account:
        """Returns whose program has sent a request. With a password, that is ignored: tunnels and
        proxies that the owner starts speak for others.
        """
        if self.has_password or not client_of(scope).is_here:
            return Account.UNKNOWN
        return peer_account(scope)

    def is_owners(self, scope: Scope) -> bool:
        """Returns whether a request needs no session, since the owner's program has sent it."""
        return self.account_of(scope) is Account.OWNER

    def way_in(self, scope: Scope) -> str | None:
        """Returns what the page shows of logins: of a "session" that can log out, to the "owner"
        the sessions of others, or nothing where there is none.
        """
        if self.session_of(scope) is not None:
            return "session"
        return "owner" if self.is_owners(scope) and self.sessions.all() else None

    def refusal(self, scope: Scope) -> str:
        """Returns why a program gets no answer, in one sentence."""
        if self.has_password:
            return "Log in first."
        if self.account_of(scope) is Account.ANOTHER:
            return (
                "This app belongs to another account of this machine; its owner lets others in "
                f"with a link that works once: {command_for_others()}."
            )
        return (
            "This app cannot tell whose program asks; open it with a link that works once, which "
            f"its owner gets by {command_for_others()}."
        )

    def redeem(self, token: str) -> bool:
        """Consumes a link's token. Returns whether it was correct and still unused."""
        return self.links.redeem(token)

    def accepts(self, user: str, password: str) -> bool:
        """Returns whether this is the user with the password."""
        if not self.has_password:
            return False
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
        browser = browser_name(agents[0].decode("latin-1") if agents else "")
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
    login: bool | str | None,
    host: str,
    key_path: Path,
    port: int = 0,
    has_proxies: bool = False,
) -> Login | None:
    """Returns the login of a server that listens on `host`, or None where everybody may come in.

    `login` is "user:password", True (ask in the terminal), None (the environment variable
    RAMSTREAM_LOGIN, or without it no password), or False (everybody may come in). Raises
    RamstreamError if other machines can reach `host`, or come through proxies, and there is no
    password.
    """
    text = login if isinstance(login, str) else os.environ.get(LOGIN_VARIABLE, "")
    if login is False and text:
        raise RamstreamError(
            f"--no-login: {LOGIN_VARIABLE} sets a login; leave one of the two out."
        )
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
    if has_proxies:
        raise RamstreamError(
            "--proxy: other machines reach the app through a proxy, so it needs a login; add "
            f"--login or set {LOGIN_VARIABLE}."
        )
    return None if login is False else Login.without_password(key_path, port)


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


def _read_or_create_key(path: Path) -> tuple[bytes, str]:
    """Returns the key that signs logins, and a sentence on why the one that was there was replaced,
    if so: its file was cut off, or another account could have read or written it.
    """
    replaced = ""
    try:
        with contextlib.suppress(FileNotFoundError):
            status = safe_files.lstat(path, path.parent)
            if status is not None and not _is_private(status):
                replaced = "could be read or written by other accounts"
            elif status is not None:
                key = safe_files.read_bytes(path, path.parent)
                if len(key) >= _KEY_BYTES:
                    return key, ""
                replaced = "was cut off"
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RamstreamError(
            f"{path}: the key that signs logins cannot be read ({error.strerror})."
        ) from None
    key = secrets.token_bytes(_KEY_BYTES)
    try:
        # The file is created with its final mode, so that it is never readable by others.
        safe_files.write_whole(path, key, path.parent, mode=safe_files.PRIVATE)
    except OSError as error:
        raise RamstreamError(
            f"{path}: the key that signs logins cannot be written ({error.strerror})."
        ) from None
    return key, replaced


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
