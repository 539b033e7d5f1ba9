"""Every route of the served app, ours and Gradio's, refuses requests that it must not accept. The
list of routes comes from the application itself, so that a route added later is included.
"""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from starlette.applications import Starlette

from app.server.connections import server_config
from app.server.gradio_paths import is_needed
from app.server.guard import Guard, GuardPolicy
from app.server.login import LOGIN_PATH, Login
from app.server.login_form import login_routes
from app.server.page_files import APP
from tests.support.mounted import READS, answers, kind_of, walked
from tests.support.served import ADDRESS, login_cookie_of, served

NOT_JSON = (
    "text/plain",
    "multipart/form-data; boundary=x",
    "application/x-www-form-urlencoded",
    "",
)


@pytest.fixture(scope="module")
def login(tmp_path_factory):
    return Login("ada", "open sesame", tmp_path_factory.mktemp("login") / "key")


@pytest.fixture(scope="module")
def app(tmp_path_factory, login):
    return served(tmp_path_factory.mktemp("runs"), login).app


@pytest.fixture(scope="module")
def routes(app):
    return sorted(set(walked(app.routes)))


def refused(app, routes, headers):
    """Returns the status by route, and checks that each refusal is one sentence."""
    found = {}
    requests = [
        (method, path, {"content-type": kind_of(method, path), **headers})
        for method, path, _ in routes
    ]
    for (method, path, _), answer in zip(routes, answers(app, requests)):
        found[method, path] = answer.status_code
        assert method == "HEAD" or len(answer.json()["error"]) < 120
    return found


def test_the_list_has_our_routes_and_all_of_gradios(routes):
    paths = {path for _, _, path in routes}
    assert {
        "/",
        "/login",
        "/config",
        "/static/{path:path}",
        "/gradio_api/upload",
        "/gradio_api/file={path_or_url:path}",
        "/gradio_api/run/{api_name}",
        "/gradio_api/queue/join",
        "/gradio_api/proxy={url_path:path}",
        "/monitoring/{key}",
        "/api/check",
        "/api/runs/{run_id}/control",
        "/ramstream/{name:path}",
    } <= paths
    assert len(paths) > 90


def test_the_list_has_every_route_that_the_page_asks_for(routes):
    known = [
        re.compile("[^/]+".join(map(re.escape, re.split(r"{[^}]*}", path))))
        for _, _, path in routes
    ]
    asked = {
        path
        for file in APP.rglob("*.js")
        for path in re.findall(
            r"""['"`](/api/(?:\$\{[^}]*\}|[^'"`?$])*)""", file.read_text(encoding="utf-8")
        )
    }
    assert len(asked) > 20
    for path in asked:
        assert any(
            route.fullmatch(re.sub(r"\$\{[^}]*\}", "x", path)) for route in known
        ) or path.endswith("/${what}"), path


def test_without_the_cookie_no_route_answers(app, routes):
    guarded = [route for route in routes if route[1].rstrip("/") != LOGIN_PATH]
    assert set(refused(app, guarded, {}).values()) == {401}
    (page,) = answers(app, [("GET", "/?run=r1", {"accept": "text/html"})])
    assert page.status_code == 303
    assert page.headers["location"] == f"{LOGIN_PATH}?next=/%3Frun%3Dr1"


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"host": "evil.example"}, 400),
        ({"host": "127.0.0.1.evil.example:7860"}, 400),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
def test_what_comes_from_elsewhere_reaches_no_route(app, routes, login, headers, status):
    cookie = {"cookie": login_cookie_of(login)}
    assert set(refused(app, routes, cookie | headers).values()) == {status}


@pytest.mark.parametrize("kind", NOT_JSON)
def test_what_is_sent_is_json(app, routes, login, kind):
    cookie = {"cookie": login_cookie_of(login), "content-type": kind}
    sent = [
        route
        for route in routes
        if route[0] not in READS and not (route[1] == LOGIN_PATH and "urlencoded" in kind)
    ]
    assert len(sent) > 40
    assert set(refused(app, sent, cookie).values()) == {415}


def test_of_gradio_only_what_the_page_needs_is_served(app, routes, login):
    """Files by path, uploads, proxies, streams, deep links, the API, monitoring, recordings and
    editors are not served.
    """
    cookie = {"cookie": login_cookie_of(login), "content-type": "application/json"}
    gradios = [
        route
        for route in routes
        if not route[1].startswith(("/api/", "/ramstream/", "/v1/")) and route[1] != LOGIN_PATH
    ]
    closed = [route for route in gradios if not is_needed(route[0], route[1])]
    assert set(refused(app, closed, cookie).values()) == {404}
    served_of_gradio = {path for _, _, path in gradios} - {path for _, _, path in closed}
    (core,) = (path for path in served_of_gradio if path.startswith("/assets/core-"))
    assert served_of_gradio - {core} == {
        "/",
        "/config",
        "/theme.css",
        "/favicon.ico",
        "/manifest.json",
        "/assets/{path:path}",
        "/gradio_api/app_id",
        "/gradio_api/heartbeat/{session_hash}",
        "/gradio_api/queue/data",
        "/gradio_api/queue/join",
    }
    later = (
        "/gradio_api/added-later",
        "/gradio_api/file=/etc/passwd",
        "/static/js/../../routes.py",
        "/runs",
        "/openapi.json",
    )
    assert not any(is_needed("GET", path) for path in later)
    assert is_needed("POST", "/gradio_api/run/predict")
    assert not is_needed("POST", "/gradio_api/upload")


def test_the_page_and_its_files_are_served(tmp_path):
    app = served(tmp_path, None).app
    (page,) = answers(app, [("GET", "/", {})])
    assert page.status_code == 200
    files = set(re.findall(r"/(?:assets|ramstream)/[\w./-]+\.(?:js|css)", page.text))
    assert len(files) >= 5, "two of Gradio, two of ours, and that for charts"
    assert {
        path: answer.status_code
        for path, answer in zip(files, answers(app, [("GET", path, {}) for path in files]))
    } == dict.fromkeys(files, 200)


# ---------------------------------------------------------------------- the login


def test_the_link_logs_in_once_whichever_comes_first(app, tmp_path):
    login = Login("ada", "open sesame", tmp_path / "key")
    app = Guard(app, GuardPolicy.for_bind("127.0.0.1", login))

    async def go():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url=ADDRESS
        ) as client:
            return await asyncio.gather(
                *[client.get("/", params={"token": login.link_token}) for _ in range(8)]
            )

    cookies = [answer.headers.get("set-cookie") for answer in asyncio.run(go())]
    (cookie,) = filter(None, cookies)
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(cookie.split("; "))


def test_addresses_which_may_carry_the_token_are_not_logged(app):
    config = server_config(app, "127.0.0.1", 7860)
    assert not config.access_log and config.log_level == "warning"


def test_secrets_are_compared_in_constant_time(login, monkeypatch):
    compared = []
    monkeypatch.setattr(
        "app.server.login.hmac.compare_digest", lambda a, b: compared.append((a, b)) or False
    )
    login.redeem("a guess")
    login.accepts("ada", "a guess")
    assert {pair[0] for pair in compared} == {b"a guess", b"ada"}


def test_who_guesses_passwords_is_not_listened_to_for_a_minute(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("app.server.attempts.time.monotonic", lambda: now[0])
    monkeypatch.setattr("app.server.login_form.WRONG_PASSWORD_SECONDS", 0)
    app = Starlette(routes=login_routes(Login("ada", "right", tmp_path / "key")))

    def tries(password, address, times=1):
        async def go():
            transport = httpx.ASGITransport(app, client=(address, 1))
            async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
                posts = [
                    client.post(LOGIN_PATH, data={"user": "ada", "password": password})
                    for _ in range(times)
                ]
                return [answer.status_code for answer in await asyncio.gather(*posts)]

        return asyncio.run(go())

    assert tries("wrong", "10.0.0.1", 12) == [401] * 10 + [429] * 2
    assert tries("right", "10.0.0.1") == [429]
    assert tries("right", "10.0.0.2") == [303]
    for number in range(3, 30):
        tries("wrong", f"10.0.0.{number}", 10)
    assert tries("right", "10.0.0.99") == [429]
    now[0] += 61
    assert tries("right", "10.0.0.1") == [303]
