"""Over a real socket: the list of who is logged in, logging out, and what ends with a session."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from app.server.guard import Guard, GuardPolicy
from app.server.login import Login
from app.server.login_form import login_routes
from app.server.login_sessions import KEY_NOT_KEPT, KEY_REPLACED, UNREADABLE
from app.server.session_routes import session_routes
from tests.support.over_sockets import FromElsewhere, ask, enter, heard, opened, post, serving
from tests.support.served import served
from tests.support.stuck import never_stuck

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")

RIGHT = "open sesame"
FIREFOX = "User-Agent: Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"
SECRET = "what only who is logged in may see"
MOST_TICKS = 150
"""A stream of ticks ends before it has ticked so often."""
MARK = '<meta name="ramstream-login" content="'
LARGE, PIECES = 4_000_000, 20


class Held:
    """An answer that has begun to be made, and goes on when the test says so."""

    def __init__(self):
        self.begun, self.continues = threading.Event(), threading.Event()


def make_app(login, held):
    async def ticks(request):
        async def ticking():
            while True:
                yield f"data: {SECRET}\n\n"
                await asyncio.sleep(0.02)

        return StreamingResponse(ticking(), media_type="text/event-stream")

    async def silence(request):
        async def silent():
            yield ": nothing yet\n\n"
            await asyncio.sleep(600)

        return StreamingResponse(silent(), media_type="text/event-stream")

    async def late(request):
        return JSONResponse({"secret": SECRET})

    async def later(request):
        held.begun.set()
        await asyncio.to_thread(held.continues.wait, 60)
        return JSONResponse({"secret": SECRET})

    async def large(request):
        async def pieces():
            for _ in range(PIECES):
                yield b"x" * (LARGE // PIECES)
                await asyncio.sleep(0.05)

        return StreamingResponse(pieces(), headers={"content-length": str(LARGE)})

    routes = [
        Route("/api/runs", late),
        *(Route(f"/{each.__name__}", each) for each in (ticks, silence, late, later, large)),
        *login_routes(login),
        *session_routes(login),
    ]
    return FromElsewhere(Guard(Starlette(routes=routes), GuardPolicy.for_bind("127.0.0.1", login)))


@pytest.fixture
def login(tmp_path):
    return Login("ada", RIGHT, tmp_path / "key")


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def port(login, held):
    with serving(make_app(login, held)) as port:
        yield port


def sessions(port, cookie):
    answer = ask(port, "/api/sessions", [f"Cookie: {cookie}"])
    assert answer.status == 200, answer
    return json.loads(answer.body)


def test_who_is_logged_in_is_listed(port):
    began = time.time()
    mine = enter(port, RIGHT, [FIREFOX]).cookie
    other = enter(port, RIGHT, ["User-Agent: <b>Chrome/1 evil</b>"], source="127.0.0.7").cookie
    ask(port, "/login", [f"Cookie: {other}"], source="127.0.0.8")
    listed = sessions(port, mine)
    assert listed["user"] == "ada" and began <= listed["now"] <= time.time()
    first, second = listed["sessions"]
    assert (first["is_own"], first["address"], first["browser"]) == (
        True,
        "127.0.0.1",
        "Firefox on Linux",
    )
    assert (second["is_own"], second["address"], second["browser"]) == (
        False,
        "203.0.113.8",
        "Chrome",
    ), "the address is the one seen last, the browser a word of ours"
    for session in (first, second):
        assert began <= session["began"] <= session["seen"] <= listed["now"]
    assert second["seen"] > second["began"]
    tokens = [cookie.partition("=")[2] for cookie in (mine, other)]
    assert not any(token in json.dumps(listed) for token in tokens), "no list shows a secret"


def test_a_damaged_file_of_logins_is_told_where_one_logs_in_and_in_the_list(
    port, login, held, tmp_path
):
    mine = enter(port, RIGHT).cookie
    assert UNREADABLE not in ask(port, "/login").body and sessions(port, mine)["fault"] == ""
    (file,) = tmp_path.glob(".login.sessions-*.json")
    file.write_text('{"key"')
    with serving(make_app(Login("ada", RIGHT, tmp_path / "key"), held)) as again:
        assert ask(again, "/late", [f"Cookie: {mine}"]).status == 401
        assert UNREADABLE in ask(again, "/login").body
        assert sessions(again, enter(again, RIGHT).cookie)["fault"] == UNREADABLE


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (lambda key: key.write_bytes(key.read_bytes()[:7]), "was cut off"),
        (lambda key: key.write_bytes(b""), "was cut off"),
        (lambda key: key.chmod(0o644), "could be read or written by other accounts"),
    ],
    ids=["cut off", "empty", "open to others"],
)
def test_a_key_of_logins_that_is_replaced_is_told_like_a_damaged_file(
    port, login, held, tmp_path, capsys, damage, reported
):
    mine, key = enter(port, RIGHT).cookie, tmp_path / "key"
    assert sessions(port, mine)["fault"] == ""
    damage(key)
    capsys.readouterr()
    with serving(make_app(Login("ada", RIGHT, key), held)) as again:
        assert capsys.readouterr().err == (
            f"ramstream: {key}: the key that signs logins {reported} and was replaced, so log in "
            "again.\n"
        )
        assert ask(again, "/late", [f"Cookie: {mine}"]).status == 401
        assert KEY_REPLACED in ask(again, "/login").body
        assert sessions(again, enter(again, RIGHT).cookie)["fault"] == KEY_REPLACED
    assert Login("ada", RIGHT, key).sessions.fault == "", "it is told once"


def test_a_key_of_logins_that_cannot_be_kept_is_told(tmp_path, capsys):
    """Without a password the app starts all the same."""
    key = tmp_path / "key"
    assert Login.without_password(key).sessions.fault == ""
    key.unlink()
    key.mkdir()
    assert Login.without_password(key).sessions.fault == KEY_NOT_KEPT
    shown = capsys.readouterr().err
    assert shown.startswith(f"ramstream: {key}: the key that signs logins cannot be ")
    assert shown.endswith(" After a restart, log in again.\n") and shown.count("\n") == 1


def test_logging_out_ends_the_session_on_the_server(port, login, tmp_path):
    mine, other = enter(port, RIGHT).cookie, enter(port, RIGHT).cookie
    answer = post(port, "/api/sessions/logout", mine)
    name = mine.partition("=")[0]
    assert answer.status == 200
    assert f"set-cookie: {name}=; Max-Age=0; Path=/; HttpOnly" in answer.head
    assert ask(port, "/late", [f"Cookie: {mine}"]).status == 401, "the old cookie is worth nothing"
    assert ask(port, "/late", [f"Cookie: {other}"]).status == 200, "others stay"
    assert post(port, "/api/sessions/logout", mine).status == 401
    # It does not come back with a restart.
    again = Login("ada", RIGHT, tmp_path / "key").sessions
    assert again.find(mine.partition("=")[2]) is None
    assert again.find(other.partition("=")[2]) is not None


def test_others_can_be_ended_one_by_one_and_all_at_once(port):
    mine, *others = [enter(port, RIGHT).cookie for _ in range(4)]
    listed = sessions(port, mine)["sessions"]
    assert [session["is_own"] for session in listed] == [True, False, False, False]

    def end(name):
        return post(port, "/api/sessions/end", mine, json.dumps({"name": name}).encode())

    answer = end(listed[1]["name"])
    assert answer.status == 200
    assert [each["name"] for each in json.loads(answer.body)["sessions"]] == [
        listed[0]["name"],
        *(session["name"] for session in listed[2:]),
    ]
    alive = [ask(port, "/late", [f"Cookie: {cookie}"]).status for cookie in others]
    assert sorted(alive) == [200, 200, 401]
    for name in (listed[1]["name"], listed[0]["name"], "", "nothing"):
        refused = end(name)
        assert refused.status == 409 and json.loads(refused.body)["error"].endswith("."), name
    assert post(port, "/api/sessions/end", mine, b'{"name": 1}').status == 409
    answer = post(port, "/api/sessions/end_others", mine)
    assert [session["is_own"] for session in json.loads(answer.body)["sessions"]] == [True]
    assert [ask(port, "/late", [f"Cookie: {cookie}"]).status for cookie in others] == [401] * 3


def test_who_logs_in_again_has_one_session(port):
    before = enter(port, RIGHT).cookie
    again = enter(port, RIGHT, [f"Cookie: {before}"]).cookie
    assert len(sessions(port, again)["sessions"]) == 1
    assert ask(port, "/late", [f"Cookie: {before}"]).status == 401


def begun(port, path, cookie):
    """Returns a connection on which an answer has begun, and what came of it."""
    line = opened(port)
    line.settimeout(30)
    line.sendall(
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n"
        "Connection: close\r\n\r\n".encode()
    )
    text = b""
    while b"\r\n\r\n" not in text or text.endswith(b"\r\n\r\n"):
        text += line.recv(1000)
    return line, text


@pytest.mark.parametrize("path", ["/ticks", "/silence"])
@pytest.mark.parametrize("by", ["logout", "another"])
def test_a_stream_ends_with_its_session(port, path, by, capfd):
    mine, other = enter(port, RIGHT).cookie, enter(port, RIGHT).cookie
    line, shown = begun(port, path, mine)
    assert shown.startswith(b"HTTP/1.1 200")
    if by == "logout":
        assert post(port, "/api/sessions/logout", mine).status == 200
    else:
        assert post(port, "/api/sessions/end_others", other).status == 200
    rest = b""
    with line, never_stuck():
        while piece := line.recv(65536):
            rest += piece
    assert rest.count(SECRET.encode()) < MOST_TICKS
    assert rest.endswith(b"0\r\n\r\n"), "the answer is complete, so that no client waits for more"
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err and "ASGI" not in printed.err, printed.err


def test_the_streams_of_others_go_on(port):
    mine, other = enter(port, RIGHT).cookie, enter(port, RIGHT).cookie
    line, _ = begun(port, "/ticks", other)
    with line:
        assert post(port, "/api/sessions/logout", mine).status == 200
        heard_since = b""
        while heard_since.count(SECRET.encode()) < 10:
            heard_since += line.recv(4096)


def test_an_answer_that_was_not_begun_is_not_given_to_an_ended_session(port, held):
    mine, other = enter(port, RIGHT).cookie, enter(port, RIGHT).cookie
    with opened(port) as line:
        line.sendall(
            f"GET /later HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {mine}\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        assert held.begun.wait(60)
        assert post(port, "/api/sessions/end_others", other).status == 200
        held.continues.set()
        answer = heard(line)
    assert answer.status == 401 and SECRET not in answer.body


@pytest.mark.slow("it tries a fault at many moments of a run")
def test_an_answer_that_has_begun_is_whole(port, capfd):
    mine, other = enter(port, RIGHT).cookie, enter(port, RIGHT).cookie
    line, shown = begun(port, "/large", mine)
    assert post(port, "/api/sessions/end_others", other).status == 200
    with line:
        while piece := line.recv(65536):
            shown += piece
    assert len(shown.partition(b"\r\n\r\n")[2]) == LARGE
    assert "Traceback" not in capfd.readouterr().err


# ---------------------------------------------------------------------- the whole app


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The served app, with a login."""
    login = Login("ada", RIGHT, tmp_path_factory.mktemp("login") / "key")
    app = served(tmp_path_factory.mktemp("runs"), login)
    with serving(app.app) as port:
        yield port
    app.session.close()


@pytest.fixture
def cookie(whole):
    return enter(whole, RIGHT).cookie


def test_only_with_a_login_does_the_page_have_sessions(whole, cookie, tmp_path):
    assert json.loads(ask(whole, "/api/sessions", [f"Cookie: {cookie}"]).body)["user"] == "ada"
    assert f"{MARK}session" in ask(whole, "/", [f"Cookie: {cookie}"]).body
    without = served(tmp_path)
    with serving(without.app) as port:
        assert ask(port, "/api/sessions").status == 404
        assert MARK not in ask(port, "/").body
        assert post(port, "/api/sessions/logout", "").status in (404, 405)
    without.session.close()


def test_gradios_heartbeat_ends_with_the_session(whole, cookie, capfd):
    other = enter(whole, RIGHT).cookie
    line, shown = begun(whole, "/gradio_api/heartbeat/abc", cookie)
    assert b"ALIVE" in shown
    assert post(whole, "/api/sessions/end_others", other).status == 200
    with line, never_stuck():
        while line.recv(65536):
            pass
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "query",
    [
        "session_hash=unknown",
        "session_hash=",
        "",
        "session_hash=a&session_hash=b",
        f"session_hash={'x' * 5000}",
        "session_hash=%00%ff",
        "session_hash=../../x",
    ],
)
def test_an_unknown_stream_is_answered_shortly_and_without_a_traceback(whole, cookie, query, capfd):
    with never_stuck():
        answer = ask(whole, f"/gradio_api/queue/data?{query}", [f"Cookie: {cookie}"])
    assert answer.status in (200, 422), answer
    assert len(answer.body) < 400 and "Traceback" not in answer.body
    if answer.status == 200:
        message = json.loads(answer.body.removeprefix("data: "))
        assert message["msg"] == "unexpected_error" and message["session_not_found"]
    printed = capfd.readouterr()
    assert printed.err == "" and printed.out == ""
