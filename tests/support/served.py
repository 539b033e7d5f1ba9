"""The app as it is served, in this process: the page, our routes, Gradio's and the guard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.application import build_app
from app.pages.frame.page import build_page
from app.pages.new.checker import Checker
from app.server.api_key import KEY_FILE, ApiKey
from app.server.cookies import login_cookie
from app.server.guard import GuardPolicy
from app.server.login import Login
from app.session.session import Session
from app.shared.theme import css_variables, make_theme

PORT = 7860
ADDRESS = f"http://127.0.0.1:{PORT}"


def login_cookie_of(login: Login, port: int = PORT) -> str:
    """Returns the Cookie header of a browser that has just logged in at this port."""
    return f"{login_cookie(port)}={login.sessions.begin('127.0.0.1', 'Test')}"


@dataclass(frozen=True)
class Served:
    app: Any
    session: Session


def served(runs: Path, login: Login | None = None, **limits: Any) -> Served:
    """`limits` are those of the guard's policy."""
    session = Session(runs)
    checker = Checker(session)
    hosts = GuardPolicy.for_bind("127.0.0.1", login).hosts
    policy = GuardPolicy(hosts, login=login, api_key=ApiKey(runs / KEY_FILE), **limits)
    return Served(
        build_app(
            session,
            checker,
            build_page(session, checker),
            policy,
            theme=make_theme(),
            css=css_variables(),
        ),
        session,
    )
