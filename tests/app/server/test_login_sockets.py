"""Over a real socket: the cookie beside those of other programs, guesses, proxies and ports."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from app.server import attempts, login_form
from app.server.clients import Proxies
from app.server.guard import Guard, GuardPolicy
from app.server.login import Login
from app.server.login_form import login_routes
from app.server.session_routes import session_routes
from tests.support.over_sockets import FromElsewhere, ask, enter, opened, post, request, serving

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")

RIGHT = "open sesame"
RUNS = "/api/runs"


async def echo(request):
    """Returns what reaches the app behind the guard."""
    return JSONResponse(
        {
            "client": request.client.host if request.client else None,
            "scheme": request.url.scheme,
            "headers": [name for name, _ in request.headers.items()],
        }
    )


def guarded(login, *proxies):
    """Returns an app behind the guard, and behind what makes 127.0.0.2 another machine."""
    routes = [Route(RUNS, echo), *login_routes(login), *session_routes(login)]
    policy = GuardPolicy.for_bind("127.0.0.1", login, Proxies.named(proxies))
    return FromElsewhere(Guard(Starlette(routes=routes), policy))


@pytest.fixture
def login(tmp_path):
    return Login("ada", RIGHT, tmp_path / "key")


class Turns:
    """How many passwords were checked at the machine itself, each in a turn of its own."""

    def __init__(self, monkeypatch):
        self.taken, self.of = 0, set()
        turn = attempts.Attempts.turn

        async def counted(asked, client, has_left):
            has_turn = await turn(asked, client, has_left)
            self.taken += has_turn and client.is_here
            self.of.add(asked)
            return has_turn

        monkeypatch.setattr(attempts.Attempts, "turn", counted)


@pytest.fixture
def turns(monkeypatch):
    return Turns(monkeypatch)


@pytest.fixture
def port(login, monkeypatch):
    monkeypatch.setattr(login_form, "WRONG_PASSWORD_SECONDS", 0)
    with serving(guarded(login)) as port:
        yield port


@pytest.fixture
def proxied(login, monkeypatch):
    """A server that has a proxy at 127.0.0.1, and another one at 10.1.1.1 before that."""
    monkeypatch.setattr(login_form, "WRONG_PASSWORD_SECONDS", 0)
    with serving(guarded(login, "127.0.0.1", "10.1.0.0/16")) as port:
        yield port


# ---------------------------------------------------------------------- the cookie

FOREIGN = [
    b'prefs={"theme":"dark"}',
    b"filter[x]=1",
    b"x=hello world",
    b'a="never closed',
    b'a="; b="\\"; c=d"e"',
    b"name=\xff\xfe\xe9\x80",
    b"\xe9\xff=1; \xc3\x28",
    b"=; ==; ;;; , ; =x; y",
    b"a=1,b=2, c=3",
    b"$Version=1; $Path=/",
    b"ramstream_login=1; ramstream_login_=2; xramstream_login_1=3",
    b"; ".join(b"pair%d=value%d" % (number, number) for number in range(5000)),
    b"large=" + b"x" * 700_000,
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda pairs: repr(pairs[:24]))
def test_cookies_of_other_programs_are_in_nobodys_way(port, foreign):
    others = b"Cookie: " + foreign
    entered = enter(port, RIGHT, [others])
    assert entered.status == 303, entered
    ours = entered.cookie.encode()
    for headers in (
        [b"Cookie: " + foreign + b"; " + ours],
        [b"Cookie: " + ours + b"; " + foreign],
        [b"Cookie:" + ours + b" ;" + foreign],
        [others, b"Cookie: " + ours],
        [b"cookie: " + ours, others],
    ):
        assert ask(port, RUNS, headers).status == 200, headers[0][:200]
    assert ask(port, RUNS, [others]).status == 401


def test_of_two_cookies_with_our_name_any_valid_one_counts(port):
    ours = enter(port, RIGHT).cookie
    name, _, token = ours.partition("=")
    for before, behind in (("stale", token), (token, "stale"), ("", token), ('"odd"', token)):
        pairs = f"{name}={before}; {name}={behind}"
        assert ask(port, RUNS, [f"Cookie: {pairs}"]).status == 200, pairs
        lines = [f"Cookie: {name}={before}", f"Cookie: {name}={behind}"]
        assert ask(port, RUNS, lines).status == 200, pairs
    for wrong in (f"{name}=stale", f"x{name}={token}", f"{name}x={token}", f"{name[:-1]}={token}"):
        assert ask(port, RUNS, [f"Cookie: {wrong}"]).status == 401, wrong


def test_what_is_behind_the_guard_sees_no_cookie(port):
    ours = enter(port, RIGHT).cookie
    seen = ask(port, RUNS, [f"Cookie: a=1; {ours}", "X-Other: 1"]).body
    assert '"x-other"' in seen and "cookie" not in seen


def test_two_servers_on_one_host_leave_each_others_login_alone(tmp_path):
    logins = [Login("ada", RIGHT, tmp_path / "key", number) for number in (1, 2)]
    with serving(guarded(logins[0])) as one, serving(guarded(logins[1])) as other:
        jar = dict(enter(each, RIGHT).cookie.split("=") for each in (one, other))
        assert len(jar) == 2, "a cookie of one port would replace that of another"
        header = "Cookie: " + "; ".join(f"{name}={value}" for name, value in jar.items())
        assert [ask(each, RUNS, [header]).status for each in (one, other)] == [200, 200]
        assert post(one, "/api/sessions/logout", header.partition(": ")[2]).status == 200
        assert [ask(each, RUNS, [header]).status for each in (one, other)] == [401, 200]
    # Both kept their sessions in one folder, and neither has overwritten the other's.
    again = Login("ada", RIGHT, tmp_path / "key", 2)
    assert len(again.sessions.all()) == 1


def test_the_port_is_that_of_the_address_in_the_browser(port):
    """Two machines may be reached through two ports of this one, by SSH."""
    host = f"Host: localhost:{port + 1}"
    entered = enter(port, RIGHT, [host])
    assert entered.cookie.startswith(f"ramstream_login_{port + 1}=")
    assert ask(port, RUNS, [host, f"Cookie: {entered.cookie}"]).status == 200


# ---------------------------------------------------------------------- guesses


def test_no_header_passes_the_limit_on_wrong_passwords(port):
    def guess(number):
        claims = (
            f"X-Forwarded-For: 198.51.100.{number}",
            f"Forwarded: for=198.51.100.{number}",
            f"X-Real-IP: 198.51.100.{number}",
            "X-Forwarded-Proto: https",
        )
        return enter(port, f"guess {number}", claims, source="127.0.0.7").status

    assert [guess(number) for number in range(40)] == [401] * 10 + [429] * 30
    refused = enter(port, RIGHT, source="127.0.0.7")
    assert refused.status == 429 and "retry-after: 60" in refused.head
    assert enter(port, RIGHT, source="127.0.0.8").status == 303, "another address has its own limit"


def test_claims_reach_neither_our_code_nor_gradios(port):
    ours = enter(port, RIGHT).cookie
    claims = [
        "X-Forwarded-For: 198.51.100.1",
        "X-Forwarded-Host: evil.example",
        "X-Forwarded-Proto: https",
        "X-Gradio-Server: https://evil.example",
        "Forwarded: for=198.51.100.1",
    ]
    seen = ask(port, RUNS, [f"Cookie: {ours}", *claims]).body
    assert '"client":"127.0.0.1"' in seen and '"scheme":"http"' in seen
    assert "forwarded" not in seen and "x-gradio" not in seen
    assert "Secure" not in enter(port, RIGHT, claims).head


def test_many_addresses_together_have_a_limit_that_spares_who_is_here(port):
    for number in range(2, 12):
        assert [enter(port, "no", source=f"127.0.0.{number}").status for _ in range(10)] == (
            [401] * 10
        )
    assert enter(port, RIGHT, source="127.0.0.99").status == 429
    assert enter(port, RIGHT).status == 303


def test_at_the_machine_itself_the_right_password_always_gets_in_and_guesses_are_slow(
    port, turns, monkeypatch
):
    """The right one comes behind a crowd of wrong ones, from here and from elsewhere."""
    monkeypatch.setattr(attempts, "TURN_SECONDS", 0.05)
    crowd = 16
    for _ in range(12):
        enter(port, "no", source="127.0.0.9")
    ready = threading.Barrier(crowd + 1)

    def guess(_):
        ready.wait(60)
        return enter(port, "no").status

    with ThreadPoolExecutor(crowd) as pool:
        guesses = pool.map(guess, range(crowd))
        began = time.monotonic()
        ready.wait(60)
        time.sleep(0.1)
        assert enter(port, RIGHT).status == 303
        assert list(guesses) == [401] * crowd
        took = time.monotonic() - began
    assert took >= 0.9 * (crowd - 1) * attempts.TURN_SECONDS, "they were looked at faster"
    (counted,) = turns.of
    assert turns.taken == crowd + 1
    soon = time.monotonic() + attempts.TURN_SECONDS
    assert not counted._queue.locked() and counted._next_turn <= soon, (
        "nobody waits when the crowd has gone"
    )
    assert enter(port, RIGHT).status == 303


def test_who_has_left_the_queue_holds_nobody_up(port, turns):
    wrong = b"user=ada&password=no"
    kind = ["Content-Type: application/x-www-form-urlencoded"]
    for _ in range(60):
        with opened(port) as line:
            line.sendall(request("POST", "/login", port, kind, wrong))
    assert enter(port, RIGHT).status == 303
    assert turns.taken < 60 / 3


def test_a_login_form_is_small(port):
    answer = enter(port, "x" * 20_000)
    assert answer.status == 413


# ---------------------------------------------------------------------- a proxy that is named


def via(*hops, scheme="https"):
    return [f"X-Forwarded-For: {', '.join(hops)}", f"X-Forwarded-Proto: {scheme}"]


def test_through_a_named_proxy_the_rightmost_other_hop_is_the_client(proxied):
    for number in range(40):
        claimed = f"198.51.100.{number}"
        answer = enter(proxied, "no", via(claimed, "192.0.2.1", "10.1.1.1"))
        assert answer.status == (401 if number < 10 else 429), number
    assert enter(proxied, RIGHT, via("192.0.2.1")).status == 429
    assert enter(proxied, RIGHT, via("192.0.2.1", "192.0.2.2")).status == 303
    assert enter(proxied, RIGHT, via("[2001:db8::1]:4711", "10.1.1.1:80")).status == 303


def test_a_named_proxy_tells_scheme_client_and_host(proxied):
    outside = ["Host: ram.example.org", *via("192.0.2.7")]
    entered = enter(proxied, RIGHT, outside)
    assert entered.status == 303 and "; Secure" in entered.head
    assert entered.cookie.startswith("ramstream_login_443="), "the port in the browser"
    seen = ask(proxied, RUNS, [*outside, f"Cookie: {entered.cookie}"]).body
    assert '"client":"192.0.2.7"' in seen and '"scheme":"https"' in seen
    # Who does not come through the proxy has to name a host of ours.
    assert ask(proxied, RUNS, ["Host: ram.example.org"]).status == 400
    assert ask(proxied, RUNS, ["Host: ram.example.org"], source="127.0.0.5").status == 400
    origin = "Origin: https://evil.example"
    assert enter(proxied, RIGHT, [*outside, origin]).status == 403


def test_of_a_proxy_that_is_not_named_nothing_is_believed(proxied):
    seen = [
        enter(proxied, "no", via(f"192.0.2.{number}"), source="127.0.0.6").status
        for number in range(12)
    ]
    assert seen == [401] * 10 + [429] * 2


def test_with_a_proxy_on_this_machine_nobody_counts_as_sitting_here(proxied):
    """A proxy that names no client must not open the slow lane of who sits here to everybody."""
    for headers in ([], via("127.0.0.1"), via("unknown"), via("")):
        while (status := enter(proxied, "no", headers).status) == 401:
            pass
        assert status == 429
        assert enter(proxied, RIGHT, headers).status == 429
    assert enter(proxied, RIGHT, via("192.0.2.9")).status == 303
