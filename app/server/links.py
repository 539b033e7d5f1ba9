"""Links that let a browser in once, as those of notebooks do.

A server begins with a new secret, which is written to a file that only its owner can read.
`launch.py link` reads it there and signs further links with it, so it needs not ask the server.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets
import socket
import stat
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from engine import safe_files
from engine.errors import RamstreamError
from engine.paths import program_command

LINK_SECONDS = 600
"""Seconds for which a link of `launch.py link` works. The one of the start works until it is used.
"""
_NAME = re.compile(r"\.login\.link-([0-9]{1,5})\.json")
_TOKEN = re.compile(r"(\d{1,12})\.([\w-]{16})\.([0-9a-f]{40})", re.ASCII)
_MOST_BYTES = 4096
_WAIT_SECONDS = 2.0


class Links:
    """Makes and takes the links of one server."""

    def __init__(self, secret: bytes | None = None):
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._used: set[str] = set()

    @property
    def secret(self) -> bytes:
        """Secret that signs the links."""
        return self._secret

    def make(self, seconds: int | None = None) -> str:
        """Returns the token of a new link, which works for this long, or until the server ends."""
        end = 0 if seconds is None else int(time.time()) + seconds
        text = f"{end}.{secrets.token_urlsafe(12)}"
        return f"{text}.{self._signature(text)}"

    def redeem(self, token: str) -> bool:
        """Uses a token up. Returns whether it was one of this server, in time and not used before.

        It is called by the event loop's thread alone.
        """
        found = _TOKEN.fullmatch(token)
        if found is None:
            return False
        end, text = int(found[1]), f"{found[1]}.{found[2]}"
        if not hmac.compare_digest(found[3], self._signature(text)):
            return False
        if text in self._used or (end and time.time() >= end):
            return False
        self._used.add(text)
        return True

    def _signature(self, text: str) -> str:
        return hmac.new(self._secret, text.encode("ascii"), "sha256").hexdigest()[:40]


def command_for_others() -> str:
    """Returns the command that makes a link, without the path of the owner's program."""
    return "ramstream link" if program_command() == "ramstream" else "python launch.py link"


def token_in(text: str) -> str:
    """Returns the token that a person has pasted, alone or within its link."""
    return text.strip().rpartition("token=")[2]


# ---------------------------------------------------------------------- the file of a server


class Published(msgspec.Struct, forbid_unknown_fields=True):
    """Content of the file for the server's owner."""

    url: str
    secret: str
    """In hexadecimal digits."""


def _file(runs: Path, port: int) -> Path:
    return runs / f".login.link-{port}.json"


def publish(links: Links, runs: Path, url: str, port: int) -> bool:
    """Writes the file of a server. Returns whether that was possible."""
    published = Published(url, links.secret.hex())
    try:
        safe_files.write_whole(
            _file(runs, port),
            msgspec.json.encode(published),
            runs,
            durable=False,
            mode=safe_files.PRIVATE,
        )
    except OSError:
        return False
    return True


def withdraw(links: Links, runs: Path, port: int) -> None:
    """Removes the file of a server that has ended, unless another one has replaced it."""
    path = _file(runs, port)
    with contextlib.suppress(OSError):
        if safe_files.read_json(path, runs, Published, _MOST_BYTES).secret == links.secret.hex():
            path.unlink()


def new_link(runs: Path, port: int | None = None) -> str:
    """Returns a new link to the app that keeps its runs in `runs`.

    Raises RamstreamError, with what to do, if none or several apps run there, if they belong to
    another account, or have no login.
    """
    ports = _ports(runs)
    if port is not None:
        ports = [each for each in ports if each == port]
    found = [
        (each, published)
        for each in ports
        if (published := _read(runs, each)) and _answers(published.url)
    ]
    if not found:
        at = "" if port is None else f" on port {port}"
        raise RamstreamError(
            f"No app that gives links runs{at} with the runs folder {runs}; name the folder with "
            f"--runs-dir and the port with --port, or start the app by {program_command()}."
        )
    if len(found) > 1:
        named = ", ".join(str(each) for each, _ in found)
        raise RamstreamError(f"Apps with this runs folder are on ports {named}; add --port.")
    ((_, published),) = found
    return f"{published.url}?token={Links(bytes.fromhex(published.secret)).make(LINK_SECONDS)}"


def _ports(runs: Path) -> list[int]:
    try:
        names = safe_files.entries(runs, runs)
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))


def _read(runs: Path, port: int) -> Published | None:
    """Returns what a server has written, or None for a file that is gone or damaged.

    Raises RamstreamError for a file of another account: it would lead to that account's app.
    """
    path = _file(runs, port)
    try:
        status = safe_files.lstat(path, runs)
        if status is None:
            return None
        if status.st_uid != os.geteuid() and os.geteuid() != 0:
            raise RamstreamError(
                f"The app on port {port} belongs to another account; only that account and root "
                "make links to it."
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            return None
        published = safe_files.read_json(path, runs, Published, _MOST_BYTES)
        bytes.fromhex(published.secret)
        urlsplit(published.url).port  # noqa: B018  it raises ValueError for a damaged one
    except (OSError, ValueError):
        return None
    return published


def _answers(url: str) -> bool:
    """Returns whether a server listens there."""
    parts = urlsplit(url)
    with contextlib.suppress(OSError, ValueError):
        place = (parts.hostname or "", parts.port or 0)
        with socket.create_connection(place, timeout=_WAIT_SECONDS):
            return True
    return False
