"""Another account of this machine at the door: what it is refused, and how it is let in."""

from __future__ import annotations

import contextlib
import re

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.server.guard import Guard, GuardPolicy
from app.server.login import Login
from app.server.login_sessions import UNREADABLE
from tests.support.mounted import walked
from tests.support.neighbor import needs_root, neighbor
from tests.support.over_sockets import ask, opened, post, request, serving
from tests.support.served import served

pytestmark = needs_root

PAGE = {"Accept": "text/html"}
UPLOAD = "/api/uploads/0123456789abcdef"


@pytest.fixture(scope="module")
def other():
    with neighbor() as other:
        yield other


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    login = Login.without_password(tmp_path_factory.mktemp("login") / "key")
    app = served(tmp_path_factory.mktemp("runs"), login)
    yield app.app, login
    app.session.close()


@pytest.fixture(scope="module")
def port(app):
    with serving(app[0]) as port:
        yield port


@pytest.fixture
def login(app):
    return app[1]


@pytest.fixture(scope="module")
def routes(app):
    """Returns method and path of every route, and of some that do not exist."""
    mounted = {(method, filled) for method, filled, _ in walked(app[0].routes)}
    assert len(mounted) > 150 and {("PUT", UPLOAD), ("GET", "/config")} <= mounted
    return sorted(mounted | {("GET", "/nothing"), ("GET", "/login/x"), ("DELETE", "/")})


def kind_of(method, path):
    sent = "application/octet-stream" if (method, path) == ("PUT", UPLOAD) else "application/json"
    return {} if method in ("GET", "HEAD", "OPTIONS") else {"Content-Type": sent}


def refused(other, port, routes, cookie=None):
    """Asks for every route, and returns those that answered other than with a refusal."""
    headers = {} if cookie is None else {"Cookie": cookie}
    let_in = []
    for method, path in routes:
        body = None if not kind_of(method, path) else "{}"
        status, _, shown = other.ask(port, path, method, headers | kind_of(method, path), body)
        why = "API key is missing" if path.startswith("/v1") else "another account"
        if status != 401 or (method != "HEAD" and why not in shown):
            let_in.append((method, path, status, shown[:200]))
    return let_in


@contextlib.contextmanager
def begun(port, path, source="127.0.0.1"):
    """An answer to the owner that goes on."""
    with opened(port) as line:
        line.sendall(request("GET", path, port, [], b""))
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
        yield line


def cookie_in(headers):
    return headers["set-cookie"].partition(";")[0]


def test_another_account_gets_nothing_before_during_and_after(other, port, login, routes):
    assert refused(other, port, routes) == []
    with begun(port, "/gradio_api/heartbeat/abc"), opened(port) as sending:
        sending.sendall(
            f"PUT {UPLOAD}?name=a.csv HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            "Content-Type: application/octet-stream\r\nContent-Length: 8\r\n\r\na,b\n".encode()
        )
        assert refused(other, port, routes) == [], "while the owner uses the app"
        sending.sendall(b"1,2\n")
        assert sending.recv(4096).startswith(b"HTTP/1.1 200"), "and nothing of it is disturbed"

    status, headers, _ = other.ask(port, f"/?token={login.links.make(60)}")
    assert (status, headers["location"]) == (303, "/")
    cookie = cookie_in(headers)
    assert other.ask(port, "/api/runs", headers={"Cookie": cookie})[0] == 200
    assert refused(other, port, routes) == [], "only the browser with the cookie is let in"
    (session,) = login.sessions.all()
    login.sessions.end(session.name)
    assert refused(other, port, routes, cookie) == [], "after its session has ended"


def test_a_link_lets_one_browser_in_once_and_a_restart_keeps_it(other, port, login, app, tmp_path):
    link = f"/?token={login.links.make(60)}"
    assert other.ask(port, link, "POST", {"Content-Type": "application/json"}, "{}")[0] == 401
    assert other.ask(port, link, "HEAD")[0] == 401
    status, headers, _ = other.ask(port, link)
    cookie = cookie_in(headers)
    assert status == 303 and "HttpOnly" in headers["set-cookie"]
    for path in ("/", "/config", "/api/runs", "/api/sessions", "/ramstream/pages/frame/main.js"):
        assert other.ask(port, path, headers={"Cookie": cookie})[0] == 200, path
    status, headers, _ = other.ask(port, link)
    assert "set-cookie" not in headers and headers["location"] == "/login?link_used=1"
    status, _, page = other.ask(port, headers["location"], headers=PAGE)
    assert status == 401
    assert "was already used" in page
    assert "launch.py link" in page

    # The keys and sessions of a server are in its files.
    key = next(iter(login.sessions.all())) and login.sessions._path.parent / "key"
    again = Login.without_password(key)
    assert again.sessions.find(cookie.partition("=")[2]) is not None
    assert not again.redeem(login.links.make(60)), "links end with their server"


def test_a_stream_of_a_browser_that_was_let_in_ends_when_the_owner_says_so(other, port, login):
    _, headers, _ = other.ask(port, f"/?token={login.links.make(60)}")
    cookie = {"Cookie": cookie_in(headers)}
    status, _, shown = other.ask(
        port, "/gradio_api/heartbeat/abc", headers=cookie, stays_as="stream"
    )
    assert status == 200 and "ALIVE" in shown
    # The owner sees the session, without having one, and ends it.
    listed = ask(port, "/api/sessions")
    assert listed.status == 200 and '"is_own":false' in listed.body
    assert '"is_own":true' not in listed.body
    assert 'name="ramstream-login" content="owner"' in ask(port, "/").body
    assert post(port, "/api/sessions/logout", "").status == 409
    assert post(port, "/api/sessions/end_others", "").status == 200
    assert 'name="ramstream-login"' not in ask(port, "/").body
    assert other.ask(port, "/api/runs", headers=cookie)[0] == 401


def test_the_page_says_how_to_get_in_and_shows_no_markup_of_strangers(other, port):
    status, headers, _ = other.ask(port, "/?run=r1", headers=PAGE)
    assert (status, headers["location"]) == (303, "/login?next=/%3Frun%3Dr1")
    status, headers, page = other.ask(
        port, "/login?next=%22%3E%3Cimg%20src=x%3E&link_used=1", headers=PAGE
    )
    assert status == 401 and headers["content-type"].startswith("text/html")
    assert "<h2>This app belongs to another account</h2>" in page and "<img" not in page
    assert "password" not in page.lower()
    # Its field takes the token, or the whole link.
    assert re.search(r'<form method="get" action="/">.*name="token"', page, re.DOTALL)


def test_the_page_says_why_a_browser_that_was_let_in_is_not(other, port, login, monkeypatch):
    monkeypatch.setattr(login.sessions, "fault", UNREADABLE)
    assert UNREADABLE in other.ask(port, "/login", headers=PAGE)[2]


def test_no_claim_of_a_header_makes_another_account_the_owner(other, port):
    for headers in (
        {"X-Forwarded-For": "127.0.0.1"},
        {"Forwarded": "for=127.0.0.1"},
        {"X-Real-IP": "127.0.0.1"},
        {"Cookie": f"ramstream_login_{port}=x"},
        {"Cookie": "ramstream.peer=owner"},
        {"Authorization": "Bearer x"},
        {"Connection": "Upgrade", "Upgrade": "websocket"},
    ):
        assert other.ask(port, "/api/runs", headers=headers)[0] in (400, 401), headers
    for source in ("127.0.0.2", "127.1.2.3"):
        assert other.ask(port, "/api/runs", source=source)[0] == 401


def test_who_has_gone_before_its_request_is_read_does_nothing(other, tmp_path):
    """A closed socket may be listed as root's, and the server is root's here."""
    done = []

    async def act(request):
        done.append((await request.body()).decode())
        return JSONResponse({})

    login = Login.without_password(tmp_path / "key")
    app = Starlette(routes=[Route("/api/act", act, methods=["POST"])])
    with serving(Guard(app, GuardPolicy.for_bind("127.0.0.1", login))) as port:
        json = {"Content-Type": "application/json"}
        for _ in range(50):
            assert other.ask(port, "/api/act", "POST", json, '"other"', leaves=True)[0] == 0
        assert post(port, "/api/act", "", b'"owner"').status == 200
    assert done == ['"owner"']


def test_the_owner_needs_no_click_and_no_link(port, app):
    """Each address answers as that of a server that lets everybody in."""
    paths = [
        "/",
        "/config",
        "/api/runs",
        "/api/live",
        "/api/hardware",
        "/ramstream/pages/frame/main.js",
    ]
    assert {path: ask(port, path).status for path in paths} == dict.fromkeys(paths, 200)
    assert post(port, "/api/check", "", b"{}").status != 401
    for path in ("/login", "/?token=anything"):
        answer = ask(port, path)
        assert answer.status == 303 and "location: /\r\n" in answer.head, path
