"""Over a real socket: files that arrive whole, and those that are refused or leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from starlette.applications import Starlette

from app.pages.new import upload_routes as upload_routes_module
from app.pages.new.upload_routes import upload_routes
from app.server import connections
from app.server.guard import Guard, GuardPolicy
from app.server.login import Login
from app.server.login_form import login_routes
from app.server.session_routes import session_routes
from app.session.session import Session
from app.session.uploads import RefusedUpload, UploadLimits, Uploads
from engine.config.settings import TrainConfig
from engine.runs.record.run_folder import create_run
from tests.support.clocks import Clocks
from tests.support.disks import small_file_system
from tests.support.over_sockets import Answer, ask, enter, heard, opened, post, serving
from tests.support.routes import wait_for

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")

ONE = "0123456789abcdef"
ROWS = b"a;b\n1;2\n" * 40_000
LIMITS = UploadLimits(largest=1 << 20, quota=3 << 20, reserve=0, idle_seconds=600, least_rate=2)
"""No upload of a busy machine is given up, and whoever waited for its end would be stuck."""
FILE = "Content-Type: application/octet-stream"


@pytest.fixture
def uploads(tmp_path):
    return Uploads(tmp_path / "runs" / ".uploads", LIMITS)


@pytest.fixture
def login(tmp_path):
    return Login("ada", "right", tmp_path / "key")


def guarded(session, uploads, login=None):
    routes = upload_routes(session, uploads)
    if login is not None:
        routes += [*login_routes(login), *session_routes(login)]
    return Guard(Starlette(routes=routes), GuardPolicy.for_bind("127.0.0.1", login))


@pytest.fixture
def session(tmp_path):
    session = Session(tmp_path / "runs")
    yield session
    session.close()


@pytest.fixture
def port(session, uploads):
    with serving(guarded(session, uploads)) as port:
        yield port
    assert uploads.new_id("a.csv", 5), "nobody holds the room of an upload that has ended"


def head(port, upload_id, length, name="a.csv", *headers):
    lines = [
        f"PUT /api/uploads/{upload_id}?name={quote(name)} HTTP/1.1",
        *([] if any(line.startswith("Host:") for line in headers) else [f"Host: 127.0.0.1:{port}"]),
        *([] if any(line.startswith("Content-Type:") for line in headers) else [FILE]),
        *([] if length is None else [f"Content-Length: {length}"]),
        *headers,
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def put(port, upload_id, content, name="a.csv", *headers) -> Answer:
    """Sends a file as the page does."""
    with opened(port) as line:
        line.sendall(head(port, upload_id, len(content), name, *headers) + content)
        return heard(line)


def began(port, uploads, *headers):
    """Returns a connection on which half of a file has been received."""
    line = opened(port)
    line.sendall(head(port, ONE, len(ROWS), "a.csv", *headers) + ROWS[: len(ROWS) // 2])
    wait_for(lambda: is_arriving(uploads))
    return line


def folder_of(uploads):
    return uploads._folder


def is_arriving(uploads):
    return (folder_of(uploads) / f"{ONE}.partial").exists()


def nothing_is_left(uploads):
    """An upload holds its id for a moment longer than its folder."""
    if uploads._arriving:
        return False
    return not folder_of(uploads).exists() or not list(folder_of(uploads).iterdir())


def sentence(answer):
    return json.loads(answer.body)["error"]


# ---------------------------------------------------------------------- what arrives


def test_a_file_arrives_whole_is_listed_and_is_removed(port, uploads):
    answer = put(port, ONE, ROWS, "Fragen & Antworten.csv")
    assert answer.status == 200, answer
    upload = json.loads(answer.body)
    assert upload["name"] == "Fragen & Antworten.csv" and upload["bytes"] == len(ROWS)
    assert uploads.find(ONE).path.read_bytes() == ROWS
    assert json.loads(ask(port, "/api/uploads").body) == {"uploads": [upload], "problem": ""}
    with opened(port) as line:
        removal = head(port, ONE, 2, "", "Content-Type: application/json") + b"{}"
        line.sendall(removal.replace(b"PUT", b"DELETE"))
        assert json.loads(heard(line).body) == {"uploads": [], "problem": ""}
    assert nothing_is_left(uploads)


class Trickling:
    """A request whose bytes arrive one by one, `pause` seconds apart by a clock of the test."""

    def __init__(self, clocks: Clocks, content: bytes, pause: float):
        self.clocks, self.left, self.pause = clocks, content, pause

    async def stream(self):
        while self.left:
            self.clocks.pass_by(self.pause)
            for _ in range(3):  # what is due by now happens
                await asyncio.sleep(0)
            piece, self.left = self.left[:1], self.left[1:]
            yield piece
        yield b""


def poured(request: Trickling, limits: UploadLimits) -> bytes:
    """Returns what was written of the body of `request`."""
    written: list[bytes] = []
    incoming = SimpleNamespace(write=lambda piece: written.append(bytes(piece)))
    asyncio.run(upload_routes_module._load_tensor(request, incoming, limits))
    return b"".join(written)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_slow_file_arrives_as_long_as_something_does(monkeypatch):
    limits = dataclasses.replace(LIMITS, idle_seconds=1.0)
    assert poured(Trickling(Clocks(monkeypatch), ROWS[:8], 0.25), limits) == ROWS[:8]
    with pytest.raises(RefusedUpload, match="Nothing arrived for 1 seconds"):
        poured(Trickling(Clocks(monkeypatch), ROWS[:8], 1.25), limits)


def test_the_page_asks_before_it_sends(port, uploads):
    kind = ["Content-Type: application/json"]
    asked = ask(port, "/api/uploads", kind, b'{"name": "a.csv", "bytes": 5}')
    assert put(port, json.loads(asked.body)["id"], b"a,b\n1").status == 200
    for body, status in (
        (b'{"name": "a.csv", "bytes": 2000000}', 413),
        (b'{"name": "a.exe", "bytes": 5}', 415),
        (b'{"name": "a.csv", "bytes": true}', 409),
        (b'{"bytes": 5}', 409),
    ):
        refused = ask(port, "/api/uploads", kind, body)
        assert refused.status == status and sentence(refused)


# ---------------------------------------------------------------------- what does not


def test_a_cut_upload_leaves_nothing_and_may_be_tried_again(port, uploads):
    began(port, uploads).close()
    wait_for(lambda: nothing_is_left(uploads))
    assert put(port, ONE, ROWS).status == 200


def test_a_stalled_upload_is_given_up(session, tmp_path):
    uploads = Uploads(tmp_path / "runs" / ".uploads", dataclasses.replace(LIMITS, idle_seconds=1.0))
    with serving(guarded(session, uploads)) as port, opened(port) as line:
        line.sendall(head(port, ONE, len(ROWS)) + ROWS[: len(ROWS) // 2])
        answer = heard(line)
    assert answer.status == 408 and "Nothing arrived for 1 seconds" in sentence(answer)
    assert nothing_is_left(uploads)


def test_a_file_that_arrives_too_slowly_is_given_up(monkeypatch):
    limits = dataclasses.replace(LIMITS, least_rate=100, idle_seconds=0.5)
    request = Trickling(Clocks(monkeypatch), ROWS, 0.2)
    with pytest.raises(RefusedUpload) as refused:
        poured(request, limits)
    assert refused.value.status == 408 and "arrives too slowly, with 5 " in str(refused.value)
    assert "bytes a second of at least 100; upload it again" in str(refused.value)
    assert len(ROWS) - len(request.left) == 3, "it is looked at once, when the time is over"


def test_a_client_sends_few_files_at_once(port, uploads):
    with contextlib.ExitStack() as stack:
        for number in range(4):
            line = stack.enter_context(opened(port))
            line.sendall(head(port, f"{number:016x}", 100) + b"x")
        wait_for(lambda: len(list(folder_of(uploads).glob("*.partial"))) == 4)
        line = stack.enter_context(opened(port))
        line.sendall(head(port, ONE, 100) + b"x")
        refused = heard(line)  # its connection ends, though most of the file did not arrive
        assert refused.status == 429
        assert sentence(refused) == (
            "4 files arrive already; upload this one when one of them is here."
        )
        kind = ["Content-Type: application/json"]
        assert ask(port, "/api/uploads", kind, b'{"name": "a.csv", "bytes": 5}').status == 429
    wait_for(lambda: nothing_is_left(uploads))
    assert put(port, ONE, ROWS).status == 200


def test_slow_uploads_keep_no_page_waiting(session, uploads, monkeypatch):
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 32)
    with serving(guarded(session, uploads)) as port, contextlib.ExitStack() as stack:
        for number in range(40):
            line = stack.enter_context(opened(port))
            line.sendall(head(port, f"{number:016x}", 1000) + b"x")
        for _ in range(20):
            assert ask(port, "/api/uploads").status == 200


def test_an_id_is_used_once(port, uploads):
    with began(port, uploads) as line:
        assert put(port, ONE, b"x").status == 409
        line.sendall(ROWS[len(ROWS) // 2 :])
        assert heard(line).status == 200
    assert put(port, ONE, b"other").status == 409
    assert uploads.find(ONE).path.read_bytes() == ROWS


def test_too_large_a_file_is_refused_before_its_bytes(port, uploads):
    with opened(port) as line:
        line.sendall(head(port, ONE, LIMITS.largest + 1))
        answer = heard(line)
    assert answer.status == 413 and "at most 1.00 MiB" in sentence(answer)
    assert nothing_is_left(uploads)


def test_a_file_without_a_length_is_refused(port, uploads):
    with opened(port) as line:
        line.sendall(head(port, ONE, None, "a.csv", "Transfer-Encoding: chunked") + b"1\r\na\r\n")
        assert heard(line).status == 411
    assert nothing_is_left(uploads)


@pytest.mark.parametrize("upload_id", ["x", "..%2fx", ONE.upper(), f"{ONE}/x", ONE + "0"])
def test_another_path_is_not_exempt_from_the_guards_rules(port, uploads, upload_id):
    assert put(port, upload_id, b"a,b").status == 415, "only JSON is accepted there"
    large = b'"' + b"x" * (2 << 20) + b'"'
    with opened(port) as line:
        line.sendall(head(port, upload_id, len(large), "", "Content-Type: application/json"))
        assert heard(line).status == 413
    assert nothing_is_left(uploads)


def test_a_full_disk_is_told_and_keeps_nothing(session, tmp_path):
    with small_file_system(tmp_path / "disk", 4) as disk:
        uploads = Uploads(disk / ".uploads", UploadLimits(reserve=0))
        with serving(guarded(session, uploads)) as port, opened(port) as line:
            line.sendall(head(port, ONE, 3 << 20) + bytes(1 << 20))
            # The server writes whole MiB: the first one must be apart from the second.
            part = folder_of(uploads) / f"{ONE}.partial"
            wait_for(lambda: sum(each.stat().st_size for each in part.glob("*")) == 1 << 20)
            (disk / "of another program").write_bytes(bytes(5 << 19))
            line.sendall(bytes(1 << 20))
            answer = heard(line)
        assert answer.status == 507 and "disk" in sentence(answer)
        assert nothing_is_left(uploads)


def test_without_a_login_nothing_is_received(session, uploads, login):
    with serving(guarded(session, uploads, login)) as port:
        with opened(port) as line:
            line.sendall(head(port, ONE, len(ROWS)))  # the answer waits for no byte of the file
            assert heard(line).status == 401
        assert nothing_is_left(uploads)
        cookie = f"Cookie: {enter(port, 'right').cookie}"
        assert put(port, ONE, ROWS, "a.csv", cookie).status == 200


def test_an_upload_ends_with_its_login(session, uploads, login):
    with serving(guarded(session, uploads, login)) as port:
        cookie = enter(port, "right").cookie
        with began(port, uploads, f"Cookie: {cookie}") as line:
            assert post(port, "/api/sessions/logout", cookie).status == 200
            assert heard(line).status == 401
        wait_for(lambda: nothing_is_left(uploads))


def test_a_server_that_stops_keeps_no_half(session, uploads, monkeypatch, capfd):
    monkeypatch.setattr(connections, "SHUTDOWN_SECONDS", 0)
    with serving(guarded(session, uploads)) as port:
        line = began(port, uploads)
    line.close()
    assert nothing_is_left(uploads)
    assert "Traceback" not in capfd.readouterr().err


def test_a_file_that_a_run_waits_for_is_not_removed(port, uploads, session):
    assert put(port, ONE, ROWS, "mine.csv").status == 200
    source = str(uploads.find(ONE).path)
    config = TrainConfig.from_dict(
        {"name": "Mine", "model": {"source": "m"}, "data": {"source": source}}
    )
    run = create_run(session.runs_dir, config)
    removal = (head(port, ONE, 2, "", "Content-Type: application/json") + b"{}").replace(
        b"PUT", b"DELETE"
    )

    def remove():
        with opened(port) as line:
            line.sendall(removal)
            return heard(line)

    with run.lock():
        answer = remove()
        assert answer.status == 409 and "needs mine.csv" in sentence(answer), answer
    wait_for(lambda: remove().status == 200)  # the list of runs is read again after a second
