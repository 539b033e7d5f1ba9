"""Requests are accepted or refused by their host, origin and body, and by the login."""

from __future__ import annotations

import asyncio
import shutil
import stat
import subprocess

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.server.guard import Guard, GuardPolicy
from app.server.login import Login, is_loopback, resolve_login, tls_options
from app.server.login_form import login_routes
from app.server.login_sessions import SESSION_SECONDS
from app.server.peers import PEER_KEY, Account, Peer
from engine.errors import RamstreamError
from tests.support.served import login_cookie_of

JSON = {"content-type": "application/json"}


async def echo(request):
    return JSONResponse({"method": request.method, "size": len(await request.body())})


def make_app(host="127.0.0.1", login=None, **limits):
    routes = [
        Route(path, echo, methods=["GET", "POST", "DELETE"])
        for path in ("/", "/api/runs", "/gradio_api/component_server")
    ]
    policy = GuardPolicy.for_bind(host, login)
    policy = GuardPolicy(policy.hosts, policy.any_address, login, **limits)
    return Guard(Starlette(routes=(login_routes(login) if login else []) + routes), policy)


def call(app, method="GET", path="/", headers=None, content=None, base="http://127.0.0.1:7860"):
    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base) as client:
            return await client.request(method, path, headers=headers, content=content)

    return asyncio.run(go())


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:9999", "[::1]:7860", "localhost"])
def test_own_hosts_pass(host):
    assert call(make_app(), headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "10.0.0.5:7860",
        "",
        "localhost:abc",
        "[::1",
        "evil.example/127.0.0.1",
    ],
)
def test_foreign_hosts_are_refused(host):
    answer = call(make_app(), headers={"host": host})
    assert answer.status_code == 400
    assert "Host" in answer.json()["error"]


def test_two_host_headers_are_refused():
    sent = []

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/",
        "headers": [(b"host", b"localhost"), (b"host", b"localhost")],
    }
    asyncio.run(make_app()(scope, None, send))
    assert sent[0]["status"] == 400


def test_a_wildcard_bind_accepts_addresses_but_no_foreign_name(tmp_path):
    app = make_app("0.0.0.0")
    assert call(app, headers={"host": "192.168.1.7:7860"}).status_code == 200
    assert call(app, headers={"host": "rebound.example:7860"}).status_code == 400


def test_reads_of_other_origins_are_refused_but_links_work():
    app = make_app()
    assert call(app, headers={"origin": "http://evil.example"}).status_code == 403
    assert (
        call(app, headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}).status_code
        == 403
    )
    assert (
        call(
            app, headers={"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        ).status_code
        == 200
    )


def test_own_posts_pass_with_their_body():
    headers = {"origin": "http://127.0.0.1:7860", "sec-fetch-site": "same-origin"} | JSON
    assert call(make_app(), "POST", "/api/runs", headers, b'{"a": 1}').json() == {
        "method": "POST",
        "size": 8,
    }


def test_no_web_socket_is_served():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(
        make_app()(
            {"type": "websocket", "path": "/", "headers": [(b"host", b"localhost")]}, None, send
        )
    )
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_every_answer_carries_the_content_policy():
    for answer in (call(make_app()), call(make_app(), headers={"host": "evil.example"})):
        assert "connect-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


# ------------------------------------------------------------------ login


def make_login(tmp_path, password="open sesame"):
    return Login("ada", password, tmp_path / "login.key")


def test_the_form_gives_a_cookie_that_opens_every_route(tmp_path):
    app = make_app(login=make_login(tmp_path))
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert call(app, path="/login").status_code == 200
    wrong = call(app, "POST", "/login", form, "user=ada&password=wrong")
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
    right = call(app, "POST", "/login", form, "user=ada&password=open+sesame&next=/?run=r1")
    assert right.status_code == 303 and right.headers["location"] == "/?run=r1"
    assert "HttpOnly" in right.headers["set-cookie"]
    assert "SameSite=lax" in right.headers["set-cookie"]
    cookie = right.headers["set-cookie"].split(";")[0]
    assert call(app, path="/api/runs", headers={"cookie": cookie}).status_code == 200


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example"])
def test_a_login_never_leads_elsewhere(tmp_path, target):
    app = make_app(login=make_login(tmp_path))
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = call(app, "POST", "/login", form, f"user=ada&password=open+sesame&next={target}")
    assert answer.headers["location"] == "/"


def test_the_form_shows_the_target_as_text_only(tmp_path):
    app = make_app(login=make_login(tmp_path))
    assert "<img" not in call(app, path='/login?next=/"><img src=x onerror=alert(1)>').text


def test_cookies_expire_and_cannot_be_forged(tmp_path):
    sessions = make_login(tmp_path).sessions
    token = sessions.begin("127.0.0.1", "Test", now=0)
    assert sessions.find(token, now=SESSION_SECONDS - 1) is not None
    assert sessions.find(token, now=SESSION_SECONDS) is None
    (kept,) = (session.record.hash for session in sessions.all(now=10))
    for forged in (token[:-1], token.swapcase(), f"{token}A", "", kept, kept[:12]):
        assert sessions.find(forged, now=10) is None


def test_a_restart_logs_nobody_out_but_a_new_password_does(tmp_path):
    headers = {"cookie": login_cookie_of(make_login(tmp_path))}
    kept = (tmp_path / "login.key", tmp_path / ".login.sessions-0.json")
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    for password, status in (("open sesame", 200), ("another", 401)):
        app = make_app(login=make_login(tmp_path, password))
        assert call(app, path="/api/runs", headers=headers).status_code == status


def test_a_public_address_needs_a_login(tmp_path, monkeypatch):
    monkeypatch.delenv("RAMSTREAM_LOGIN", raising=False)
    key = tmp_path / "login.key"
    assert not resolve_login(None, "127.0.0.1", key).has_password
    assert resolve_login(False, "127.0.0.1", key) is None, "with --no-login"
    with pytest.raises(RamstreamError, match="--proxy: .* login"):
        resolve_login(None, "127.0.0.1", key, has_proxies=True)
    for host in ("0.0.0.0", "192.168.1.7", "::", "workstation.example"):
        with pytest.raises(RamstreamError, match="login"):
            resolve_login(None, host, key)
        with pytest.raises(RamstreamError, match="login"):
            resolve_login(False, host, key)
        assert resolve_login("ada:secret", host, key).accepts("ada", "secret")
    monkeypatch.setenv("RAMSTREAM_LOGIN", "bob:word:with:colons")
    assert resolve_login(None, "0.0.0.0", key).accepts("bob", "word:with:colons")
    assert resolve_login(True, "127.0.0.1", key).accepts("bob", "word:with:colons")
    with pytest.raises(RamstreamError, match="--no-login: RAMSTREAM_LOGIN"):
        resolve_login(False, "127.0.0.1", key)
    monkeypatch.setenv("RAMSTREAM_LOGIN", "nobody")
    with pytest.raises(RamstreamError, match="user:password"):
        resolve_login(None, "127.0.0.1", key)


def test_loopback_addresses():
    assert all(map(is_loopback, ["127.0.0.1", "localhost", "::1", "127.1.2.3"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", ""]))


# ---------------------------------------------------------------------- the link that logs in once


def test_the_link_logs_in_once(tmp_path):
    login = Login("a", "b", tmp_path / "key")
    app, link = make_app(login=login), f"/?token={login.link_token}"
    answer = call(app, path=link)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    assert "Secure" not in cookie
    assert (
        call(app, path="/api/runs", headers={"cookie": cookie.partition(";")[0]}).status_code == 200
    )
    # Clients that are logged in need no token in the address; all others are sent to the form.
    assert (
        call(app, path=link, headers={"cookie": cookie.partition(";")[0]}).headers["location"]
        == "/"
    )
    again = call(app, path=link)
    assert (again.status_code, "set-cookie" in again.headers) == (303, False)
    assert "was already used" in call(app, path=again.headers["location"]).text


@pytest.mark.parametrize("path", ["/?token=", "/?token=wrong", "/?token=%ff"])
def test_a_wrong_link_logs_nobody_in_and_uses_nothing_up(tmp_path, path):
    login = Login("a", "b", tmp_path / "key")
    app = make_app(login=login)
    assert "set-cookie" not in call(app, path=path).headers
    assert call(app, "POST", f"/?token={login.link_token}", JSON, b"{}").status_code == 401
    assert call(app, path=f"/api/runs?token={login.link_token}").status_code == 401
    assert "set-cookie" in call(app, path=f"/?token={login.link_token}").headers


def test_by_https_the_cookie_is_kept_to_it(tmp_path):
    login = Login("a", "b", tmp_path / "key")
    answer = call(
        make_app(login=login), path=f"/?token={login.link_token}", base="https://127.0.0.1:7860"
    )
    assert answer.headers["set-cookie"].endswith("; Secure")


def test_files_of_a_certificate_are_checked_before_the_server_starts(tmp_path):
    with pytest.raises(RamstreamError, match="--tls-key .*no such file"):
        (tmp_path / "cert.pem").write_text("no certificate")
        tls_options(tmp_path / "cert.pem", tmp_path / "key.pem")
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(RamstreamError, match="not a PEM certificate"):
        tls_options(tmp_path / "cert.pem", tmp_path / "key.pem")
    if shutil.which("openssl"):
        subprocess.run(
            [
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-subj",
                "/CN=localhost",
                "-keyout",
                tmp_path / "key.pem",
                "-out",
                tmp_path / "cert.pem",
            ],
            check=True,
            capture_output=True,
        )
        assert tls_options(tmp_path / "cert.pem", tmp_path / "key.pem")["ssl_keyfile"] == str(
            tmp_path / "key.pem"
        )


# ------------------------------------------------------------------ without a password


def knowing(app, account):
    """Returns an app whose connections come from an account."""
    peer = Peer(None, None)
    peer._account = account

    async def known(scope, receive, send):
        await app({**scope, "state": {PEER_KEY: peer}}, receive, send)

    return known


@pytest.fixture
def without_password(tmp_path):
    return Login.without_password(tmp_path / "key")


def test_the_owners_account_is_no_way_in_for_pages_of_other_sites(without_password):
    app = knowing(make_app(login=without_password), Account.OWNER)
    assert call(app, path="/api/runs").status_code == 200
    assert call(app, "POST", "/api/runs", JSON, b"{}").status_code == 200
    for headers, status in (
        ({"host": "evil.example"}, 400),
        ({"host": "rebound.example:7860"}, 400),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "http://localhost:7860"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
    ):
        for path in ("/api/runs", "/login", "/"):
            answer = call(app, "POST", path, JSON | headers, b"{}")
            assert answer.status_code == status, (path, headers)
    read = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert call(app, path="/api/runs", headers=read).status_code == 403


@pytest.mark.parametrize("account", [Account.ANOTHER, Account.UNKNOWN])
def test_all_others_need_a_link(without_password, account):
    app = knowing(make_app(login=without_password), account)
    for method, path in (
        ("GET", "/"),
        ("GET", "/api/runs"),
        ("POST", "/api/runs"),
        ("PUT", "/login"),
    ):
        answer = call(app, method, path, {} if method == "GET" else JSON)
        assert answer.status_code == 401 and "launch.py link" in answer.json()["error"], path
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert call(app, "POST", "/login", form, "user=&password=").status_code == 415
    assert not without_password.accepts("", "")
    answer = call(app, path=f"/?token=http://127.0.0.1:7860/?token={without_password.link_token}")
    assert answer.status_code == 303
    cookie = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    assert call(app, "POST", "/api/runs", cookie | JSON, b"{}").status_code == 200


def test_a_password_asks_the_owner_too(tmp_path):
    """A tunnel or a proxy that the owner has started speaks for others."""
    app = knowing(make_app(login=make_login(tmp_path)), Account.OWNER)
    assert call(app, path="/api/runs").status_code == 401


def test_the_account_of_a_connection_from_elsewhere_is_not_looked_at(without_password):
    app = knowing(make_app(login=without_password), Account.OWNER)

    async def from_elsewhere(scope, receive, send):
        await app({**scope, "client": ("203.0.113.7", 5)}, receive, send)

    assert call(from_elsewhere, path="/api/runs").status_code == 401
