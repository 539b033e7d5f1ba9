"""Every route that the app mounts has a policy, which is stated here and checked.

A new route fails the first test until somebody says who may send what to it.
"""

from __future__ import annotations

import re

import pytest

from app.server.gradio_paths import is_needed
from app.server.guard import MAX_BODY_BYTES
from app.server.login import Login
from tests.support.mounted import READS, answers, walked
from tests.support.served import login_cookie_of, served

POLICIES = {
    # It has no body and changes nothing.
    "read": """
        /api/compare /api/folders /api/folders/{number} /api/hardware /api/hardware/choices
        /api/jobs /api/jobs/{number} /api/presets /api/live /api/live/{run_id} /api/recent /api/runs
        /api/runs/{run_id}/curves.csv /api/runs/{run_id}/details /api/runs/{run_id}/evaluation
        /api/runs/{run_id}/archive /api/runs/{run_id}/file /api/runs/{run_id}/log
        /api/runs/{run_id}/room
        /api/runs/{run_id}/stretch
        /api/runs/{run_id}/timeline /api/runs/{run_id}/trace /api/sessions /api/chat
        /api/chat/choices /api/serve /api/uploads /login /ramstream/{name:path} /ramstream/plotly.js
        / /config /theme.css /favicon.ico /manifest.json /assets/{path:path} /gradio_api/app_id
        /gradio_api/heartbeat/{session_hash} /gradio_api/queue/data
    """,
    # Its body is JSON of at most 1 MiB, which the guard has read whole.
    "json": """
        /api/check /api/command /api/opening /api/presets /api/presets/remove /api/rows /api/fitting
        /api/models /api/derived /api/draft/own
        /api/hardware/column /api/hardware/csv /api/hardware/largest
        /api/hardware/measure /api/hardware/offers /api/jobs/{number}/cancel
        /api/queue/{queued}/detached /api/queue/{queued}/remove /api/queue/{queued}/up
        /api/queue/continue /api/queue/resume /api/runs/{run_id}/change /api/runs/{run_id}/control
        /api/runs/{run_id}/delete /api/runs/{run_id}/describe /api/runs/{run_id}/draft
        /api/runs/{run_id}/evaluate /api/runs/{run_id}/evaluation/reveal
        /api/runs/{run_id}/evaluation/vote
        /api/runs/{run_id}/export /api/runs/{run_id}/push /api/sessions/end
        /api/sessions/end_others
        /api/sessions/logout /api/chat/about /api/chat/new /api/chat/send /api/chat/stop
        /api/chat/unload /api/serve/start /api/serve/stop
        /api/uploads DELETE:/api/uploads/{upload} /gradio_api/queue/join
    """,
    # It is for programs that have the key of OpenAI's API; no login or account opens it.
    "key": """
        GET:/v1/models GET:/v1/models/{model:path} /v1/chat/completions /v1/completions
        HEAD:/v1/models HEAD:/v1/models/{model:path} ANY:/v1/{rest:path}
    """,
    # Its body is the login form, which anybody may send.
    "form": "/login",
    # Its body is a file, which the guard passes on as it arrives.
    "file": "PUT:/api/uploads/{upload}",
    # It answers 404, so that Gradio answers nothing below our own paths.
    "nothing": """
        ANY:/api/{rest:path} ANY:/ramstream/{rest:path}
        OPTIONS:/login PUT:/login PATCH:/login DELETE:/login
    """,
}
"""The routes of each policy. Those without a method are read by GET and HEAD if they are of the
policy `read`, and otherwise sent by POST.
"""
ANY = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
FILE = {"content-type": "application/octet-stream"}
JSON = {"content-type": "application/json"}


def stated():
    """Returns the policy of each (method, path) that has one."""
    found = {}
    for policy, routes in POLICIES.items():
        for route in routes.split():
            method, colon, path = route.partition(":/")
            methods = ("GET", "HEAD") if policy == "read" else ("POST",)
            if colon:
                methods = ANY if method == "ANY" else (method,)
            for each in methods:
                found[each, f"/{path}" if colon else route] = policy
    return found


@pytest.fixture(scope="module")
def login(tmp_path_factory):
    return Login("ada", "open sesame", tmp_path_factory.mktemp("login") / "key")


@pytest.fixture(scope="module")
def app(tmp_path_factory, login):
    app = served(tmp_path_factory.mktemp("runs"), login)
    yield app.app
    app.session.close()


@pytest.fixture(scope="module")
def routes(app):
    """Returns the policy and the filled path of every mounted route by method and template; None
    is the policy of one that has none.
    """
    known = stated()
    found = {}
    for method, filled, template in walked(app.routes):
        name = re.sub(r"plotly-\w+", "plotly", template)
        name = re.sub(r"/assets/core-[\w-]+\.js", "/assets/{path:path}", name)
        found[method, name] = (known.get((method, name)), filled)
    return found


@pytest.fixture
def statuses(app, login, routes):
    """Returns a function that sends to each route of a policy; it returns the statuses."""

    def statuses(policy, headers, content=b"{}"):
        cookie = {"cookie": login_cookie_of(login)}
        requests = [
            (method, filled, cookie | headers)
            for (method, _), (stated, filled) in sorted(routes.items())
            if stated == policy
        ]
        assert requests
        return {answer.status_code for answer in answers(app, requests, content)}

    return statuses


def test_every_mounted_route_has_a_policy_or_is_closed(routes, statuses):
    """Closed are those of Gradio that the page does not need; none of ours can be."""
    without = [route for route, (policy, _) in routes.items() if policy is None]
    open_ones = [(method, path) for method, path in without if is_needed(method, path)]
    assert open_ones == []
    assert len(without) > 50 and statuses(None, JSON) == {404}


def test_no_policy_outlives_its_route(routes):
    gradios = (
        "/gradio_api/",
        "/assets/",
        "/theme.css",
        "/favicon.ico",
        "/manifest.json",
        "/config",
    )
    gone = [route for route in stated() if route not in routes and route[0] != "HEAD"]
    assert [route for route in gone if not route[1].startswith(gradios)] == []


def test_a_route_that_takes_json_takes_nothing_else_and_little_of_it(statuses):
    assert statuses("json", FILE) == {415}
    assert statuses("json", JSON, b'"' + b"x" * MAX_BODY_BYTES + b'"') == {413}


def test_what_needs_the_key_takes_nothing_for_it(app, login, routes, statuses):
    """Neither a login, nor the owner's account, which asks here without a password."""
    assert statuses("key", JSON) == {401}
    for given in ("Bearer x", "Bearer", f"Basic {login.user}"):
        assert statuses("key", JSON | {"authorization": given}) == {401}


def test_the_form_is_a_form_and_small(statuses):
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert statuses("form", FILE) == statuses("form", JSON) == {415}
    assert statuses("form", form, b"user=" + b"x" * 20_000) == {413}


def test_only_the_file_is_exempt_from_the_rules_of_type_and_size(app, login, routes, statuses):
    assert statuses("file", JSON) == {415}
    assert [route for route, (policy, _) in routes.items() if policy == "file"] == [
        ("PUT", "/api/uploads/{upload}")
    ]
    _, path = routes["PUT", "/api/uploads/{upload}"]
    large = b"a,b\n" * MAX_BODY_BYTES
    headers = {"cookie": login_cookie_of(login)} | FILE
    (answer,) = answers(app, [("PUT", f"{path}?name=a.csv", headers)], large)
    assert answer.status_code == 200 and answer.json()["bytes"] == len(large) > MAX_BODY_BYTES


def test_what_is_nothing_answers_so(statuses):
    assert statuses("nothing", JSON) == {404}


def test_reading_needs_no_body_and_other_methods_none_of_these_paths(app, login, routes):
    cookie = {"cookie": login_cookie_of(login)} | JSON
    sent = {path for (method, path) in stated() if method not in READS}
    only_read = [
        ("POST", filled, cookie)
        for (method, path), (policy, filled) in routes.items()
        if policy == "read" and method == "GET" and path not in sent
    ]
    assert {answer.status_code for answer in answers(app, only_read)} <= {404, 405}
