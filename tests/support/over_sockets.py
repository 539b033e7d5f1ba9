"""An app is served on a real socket, and asked byte by byte, as no tidy client would ask."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import uvicorn

from app.server import connections

WAIT_SECONDS = 60
HERE = "127.0.0.1"
ELSEWHERE = "203.0.113."
"""Addresses of documentation: `FromElsewhere` makes 127.0.0.7 one of them, 203.0.113.7."""


class FromElsewhere:
    """Tells an app that a connection from 127.0.0.2 or above comes from another machine."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["client"][0] != HERE:
            host, port = scope["client"]
            scope = {**scope, "client": (host.replace("127.0.0.", ELSEWHERE), port)}
        await self.app(scope, receive, send)


@contextlib.contextmanager
def serving(app: Any, **options: Any) -> Iterator[int]:
    """Yields the port of a server of `app`."""
    listening = socket.create_server((HERE, 0))  # from here on, no other process gets the port
    port = listening.getsockname()[1]
    server = uvicorn.Server(
        connections.server_config(app, HERE, port, timeout_keep_alive=1, **options)
    )
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield port
    server.should_exit = True
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


@dataclass(frozen=True)
class Answer:
    """What a server has answered."""

    status: int
    head: str
    body: str

    @property
    def cookie(self) -> str:
        """Returns the pair that a browser sends back, or an empty text if no cookie was set."""
        line = next((line for line in self.head.split("\r\n") if line.startswith("set-cookie")), "")
        return line.partition(": ")[2].partition(";")[0]


def opened(port: int, source: str = HERE) -> socket.socket:
    """Returns a connection from an address of this machine."""
    return socket.create_connection((HERE, port), WAIT_SECONDS, source_address=(source, 0))


def request(
    method: str, path: str, port: int, headers: Iterable[str | bytes], body: bytes
) -> bytes:
    """Returns the bytes of a request; a header may have any bytes."""
    lines: list[str | bytes] = [f"{method} {path} HTTP/1.1", *headers]
    if not any(as_bytes(line).lower().startswith(b"host:") for line in lines):
        lines.append(f"Host: {HERE}:{port}")
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    return b"\r\n".join(map(as_bytes, lines)) + body


def as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def ask(
    port: int,
    path: str,
    headers: Iterable[str | bytes] = (),
    body: bytes | None = None,
    source: str = HERE,
) -> Answer:
    """Sends one request, a POST if it has a body, and returns the answer."""
    method = "GET" if body is None else "POST"
    with opened(port, source) as line:
        line.sendall(request(method, path, port, headers, body or b""))
        return heard(line)


def heard(line: socket.socket) -> Answer:
    """Returns the answer on a connection that the server closes behind it."""
    text = b""
    while piece := line.recv(65536):
        text += piece
    head, _, rest = text.decode("latin-1").partition("\r\n\r\n")
    return Answer(int(head.split()[1]), head, rest)


def enter(
    port: int,
    password: str,
    headers: Iterable[str | bytes] = (),
    source: str = HERE,
    user: str = "ada",
) -> Answer:
    """Sends the login form."""
    form = urlencode({"user": user, "password": password, "next": "/"}).encode()
    kind = "Content-Type: application/x-www-form-urlencoded"
    return ask(port, "/login", [kind, *headers], form, source)


def post(port: int, path: str, cookie: str, body: bytes = b"{}", *headers: str) -> Answer:
    """Sends JSON as our page does."""
    return ask(port, path, ["Content-Type: application/json", f"Cookie: {cookie}", *headers], body)
