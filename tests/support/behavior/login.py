"""The app with a login: what is closed, the form, the cookie, the link that works once, and
guesses.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

from tests.support.behavior.answers import Asked
from tests.support.behavior.sides import Side

FORM = {"Content-Type": "application/x-www-form-urlencoded"}
PAGE = {"Accept": "text/html"}


def gather(side: Side) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    runs = side.work / "login-runs"
    with side.serve(runs, "--login", login="me:se:cret") as server:
        ask = Asked(server, facts)
        for path in (
            "/",
            "/?run=x",
            "/api/live",
            "/config",
            "/ramstream/dashboard.js",
            "/nothing",
            "/gradio_api/app_id",
        ):
            ask("GET", path)
            ask("GET", path, headers=PAGE, name=f"GET {path} as a page")
            ask(
                "GET",
                path,
                headers={"Cookie": "ramstream_login=9999999999.0000"},
                name=f"GET {path} with a wrong cookie",
            )
        ask("POST", "/api/check", {})
        for path in (
            "/login",
            "/login?next=/x",
            "/login?next=//evil.example",
            "/login?link_used=1",
            "/login?next=%22%3E%3Cb%3E",
        ):
            ask("GET", path)

        def enter(name: str, **fields: str) -> Any:
            return ask("POST", "/login", raw=urlencode(fields).encode(), headers=FORM, name=name)

        enter("a wrong password", user="me", password="no", next="/")
        enter("a wrong user", user="you", password="se:cret", next="/x?y=1")
        ask("POST", "/login", {"user": "me", "password": "se:cret"})
        ask("POST", "/login", raw=b"user=me", headers=FORM, name="no password")
        entered = enter("the right password", user="me", password="se:cret", next="/?run=x")
        enter(
            "the right password, and a way out",
            user="me",
            password="se:cret",
            next="https://evil.example",
        )
        cookie = entered.header("set-cookie").partition(";")[0]
        # The part behind the sign is random, or holds a time and its signature.
        facts["form of the cookie"] = re.sub(
            r"=.*", "=SECRET", cookie.replace(str(server.port), "PORT")
        )
        for path in ("/api/live", "/api/runs", "/ramstream/dashboard.js", "/nothing", "/login"):
            ask("GET", path, headers={"Cookie": cookie}, name=f"GET {path} with the cookie")
        for name, sent in (
            ("cut", cookie[:-1]),
            ("with another time", cookie.replace("=", "=1")),
            ("twice", f"{cookie}; {cookie}x"),
            ("beside another one", f"other=1; {cookie}"),
            ("without a value", "ramstream_login"),
        ):
            ask("GET", "/api/live", headers={"Cookie": sent}, name=f"a cookie {name}")
        link = re.search(r"\?token=([\w-]+)", server.printed)
        facts["a link was printed"] = link is not None
        token = link[1] if link else ""
        ask("GET", "/?token=wrong", headers=PAGE)
        ask(
            "GET",
            f"/?token={token}",
            headers=PAGE | {"Cookie": cookie},
            name="the link, when logged in",
        )
        ask("GET", f"/?token={token}", headers=PAGE, name="the link")
        ask("GET", f"/?token={token}", headers=PAGE, name="the link once more")
        for number in range(8):
            enter(f"guess {number}", user="me", password=f"no{number}", next="/")
        enter(
            "the right password after too many wrong ones", user="me", password="se:cret", next="/"
        )
    facts["printed"] = re.sub(r"token=[\w-]+", "token=...", side.plain(server.printed))
    key = runs / ".login.key"
    facts["key"] = [key.stat().st_size, oct(key.stat().st_mode)]
    with side.serve(runs, login="me:se:cret") as server:
        kept = server.ask("GET", "/api/runs", headers={"Cookie": cookie})
        facts["the cookie after a restart"] = kept.status
    with side.serve(runs, login="me:other") as server:
        facts["the cookie with another password"] = server.ask(
            "GET", "/api/runs", headers={"Cookie": cookie}
        ).status
    return facts
