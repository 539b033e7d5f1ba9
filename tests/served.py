"""The app as it is served, in this process: the page, our routes, Gradio's and the guard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.check import Checker
from app.guard import GuardPolicy
from app.login import Login
from app.main import build_page
from app.server import build_app
from app.session import Session
from app.theme import css_variables, make_theme

ADDRESS = "http://127.0.0.1:7860"


@dataclass(frozen=True)
class Served:
    app: Any
    session: Session


def served(runs: Path, login: Login | None = None, **limits: Any) -> Served:
    """`limits` are those of the guard's policy."""
    session = Session(runs)
    checker = Checker(session)
    hosts = GuardPolicy.for_bind("127.0.0.1", login).hosts
    policy = GuardPolicy(hosts, login=login, **limits)
    return Served(build_app(session, checker, build_page(session, checker), policy, theme=make_theme(), css=css_variables()),
                  session)
