"""A real server on a real socket withstands clients that send slowly, send too much, or do not
speak HTTP.
"""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from app.server import connections
from tests.support import over_sockets
from tests.support.routes import wait_for
from tests.support.served import served

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")

WAIT_SECONDS = 60
HEAD = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
ASKED = b"GET /api/runs HTTP/1.1\r\n" + HEAD + b"\r\n"
POST = b"POST /api/chat/stop HTTP/1.1\r\n"


class Impatient(connections.Connection):
    head_seconds = first_seconds = 0.5

    def connection_made(self, transport):
        self.head_seconds = self.first_seconds
        super().connection_made(transport)
        del self.head_seconds


@pytest.fixture
def calm(monkeypatch):
    """A first request that is sent at once is waited for, on a busy machine too."""
    monkeypatch.setattr(Impatient, "first_seconds", WAIT_SECONDS)


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return served(tmp_path_factory.mktemp("runs"), body_timeout_seconds=1.5).app


def serving(app):
    """Yields the port of a server of `app` whose connections are impatient."""
    return over_sockets.serving(app, protocol=Impatient)


@pytest.fixture(scope="module")
def port(app):
    with serving(app) as port:
        yield port


@pytest.fixture
def line(port, monkeypatch):
    """Opens a connection; afterwards the server must still answer other clients."""
    with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as line:
        yield line
    monkeypatch.setattr(Impatient, "first_seconds", WAIT_SECONDS)
    with socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as other:
        other.sendall(ASKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert heard(other).startswith(b"HTTP/1.1 200")


def heard(line):
    """Returns everything received until the server closes the connection."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := line.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def trickled(line, piece=b"x", pause=0.05):
    """Sends pieces, `pause` seconds apart, until the server closes the connection; returns its
    answer. Of a piece that the server does not take at once, the rest is sent later.
    """
    line.setblocking(False)
    shown, left, end = b"", piece, time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        try:
            left = left[line.send(left) :] or piece
            if not (got := line.recv(65536)):
                return shown
            shown += got
        except BlockingIOError:
            pass
        except ConnectionError:
            line.setblocking(True)
            return shown + heard(line)
        time.sleep(pause)
    pytest.fail("the connection is still open")


@pytest.mark.parametrize("begin", [b"", b"GET / HTT", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_who_does_not_go_on_is_cut_off(line, begin):
    line.sendall(begin)
    assert heard(line) == b""


def test_a_head_that_trickles_is_cut_off(line):
    line.sendall(b"GET / HTTP/1.1\r\n")
    assert trickled(line, b"a: b\r\n") == b""


def test_a_second_head_that_trickles_is_cut_off(calm, line):
    line.sendall(ASKED)
    assert line.recv(65536).startswith(b"HTTP/1.1 200")
    line.sendall(b"GET / HTTP/1.1\r\n")
    assert b"HTTP" not in trickled(line, b"a: b\r\n")


def test_a_body_that_trickles_is_given_up(calm, line):
    line.sendall(POST + HEAD + b"Content-Length: 100000\r\n\r\n")
    assert trickled(line).startswith(b"HTTP/1.1 408")


def test_what_was_refused_is_not_listened_to_for_ever(calm, line):
    line.sendall(b"POST / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 100000\r\n\r\n")
    assert trickled(line).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 300,
        b"\x00" * 5000,
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
        POST + HEAD + b"Content-Length: -1\r\n\r\n",
        POST + HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        POST + HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        POST + HEAD + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\na: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    ],
    ids=lambda sent: repr(sent[:30]),
)
def test_what_is_no_request_is_refused(line, sent):
    with contextlib.suppress(ConnectionError):  # it may be closed while sending
        line.sendall(sent)
    answer = heard(line)
    assert answer == b"" or answer.split()[1] in (b"400", b"413", b"431"), answer[:200]
    assert b"Traceback" not in answer


def test_a_large_body_in_pieces_is_refused_as_soon_as_it_is_too_large(calm, tmp_path):
    """The server waits for the body as long as it must, so that a busy machine sends all of it."""
    app = served(tmp_path, body_timeout_seconds=10 * WAIT_SECONDS).app
    with serving(app) as port, line_to(port) as line:
        line.sendall(POST + HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = trickled(line, b"2000\r\n" + b"x" * 0x2000 + b"\r\n", pause=0)
    assert answer.startswith(b"HTTP/1.1 413"), answer[:200]


def test_requests_one_behind_the_other_are_each_looked_at(calm, line):
    foreign = ASKED.replace(b"127.0.0.1", b"evil.example")
    line.sendall(ASKED + foreign + ASKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert [part[:3] for part in heard(line).split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"200"]


async def patient(scope, receive, send):
    """An app that answers /wait when its client has gone, and others at once."""
    if scope["path"] == "/wait":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"waits", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def test_no_more_connections_than_can_be_served(calm, monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 8)
    wait = b"GET /wait HTTP/1.1\r\n" + HEAD + b"\r\n"
    with serving(patient) as port, contextlib.ExitStack() as stack:
        for _ in range(7):
            line = stack.enter_context(line_to(port))
            line.sendall(wait)
            assert line.recv(65536).split()[1] == b"200"
        line = stack.enter_context(line_to(port))
        line.sendall(ASKED)
        assert line.recv(65536).split()[1] == b"503"
        stack.close()
        wait_for(lambda: status_of(port) == b"200", seconds=WAIT_SECONDS)


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET /api/ru", POST + HEAD + b"Content-Length: 90\r\n\r\n{", ASKED],
    ids=["nothing", "half a head", "half a body", "nothing more"],
)
def test_who_asks_for_nothing_whole_gives_way_to_who_does(monkeypatch, begun):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 8)
    for name in ("head_seconds", "first_seconds"):
        monkeypatch.setattr(Impatient, name, 10 * WAIT_SECONDS)  # whoever waits is stuck
    with serving(patient) as port, contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(line_to(port)).sendall(begun)
        assert [status_of(port) for _ in range(20)] == [b"200"] * 20


def line_to(port):
    return socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)


def status_of(port):
    with line_to(port) as line:
        line.sendall(ASKED)
        return line.recv(65536).split()[1]
