"""Shows the login form and checks what is entered, within the limits on wrong passwords."""

from __future__ import annotations

import asyncio
import html
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from app.server.attempts import FORGOTTEN_SECONDS, Attempts
from app.server.clients import client_of
from app.server.link_page import USED, link_routes
from app.server.login import LINK_USED, LOGIN_PATH, Login
from app.server.login_style import framed

WRONG_PASSWORD_SECONDS = 0.5


def login_routes(login: Login) -> list[Route]:
    """Returns the routes of the page for who is not let in: the form, or without a password the
    page on links.
    """
    return _form_routes(login) if login.has_password else link_routes(login)


def _form_routes(login: Login) -> list[Route]:
    attempts = Attempts()

    async def form(request: Request) -> Response:
        problem = login.sessions.fault
        if LINK_USED in request.query_params:
            problem = f"{USED} Please log in."
        return HTMLResponse(_page(_own_path(request.query_params.get("next", "/")), problem))

    async def submit(request: Request) -> Response:
        fields = parse_qs((await request.body()).decode("utf-8", "replace"), keep_blank_values=True)
        user, password = fields.get("user", [""])[0], fields.get("password", [""])[0]
        target = _own_path(fields.get("next", ["/"])[0])
        client = client_of(request.scope)
        if not await attempts.turn(client, request.is_disconnected):
            return Response(status_code=408)
        # After too many wrong passwords, even a correct one is refused: otherwise guesses sent in
        # parallel could still succeed.
        if attempts.are_too_many(client):
            return HTMLResponse(
                _page(target, "Too many wrong passwords: wait a minute, then try again."),
                429,
                {"retry-after": str(FORGOTTEN_SECONDS)},
            )
        if not login.accepts(user, password):
            attempts.was_wrong(client)
            await asyncio.sleep(WRONG_PASSWORD_SECONDS)
            return HTMLResponse(_page(target, "That user or password is wrong."), status_code=401)
        return RedirectResponse(target, 303, {"set-cookie": login.begin(request.scope)})

    return [Route(LOGIN_PATH, form, methods=["GET"]), Route(LOGIN_PATH, submit, methods=["POST"])]


def _own_path(text: str) -> str:
    r"""Returns `text` when it is a path on this server, else the first page.

    A login never redirects elsewhere: browsers take a leading // or /\ for another server's
    address.
    """
    is_own = text.startswith("/") and not text.startswith(("//", "/\\"))
    return text if is_own else "/"


def _page(target: str, problem: str) -> str:
    """Returns the form, which leads to `target`. If there is a `problem`, it is shown above the
    form.
    """
    return framed(
        "Log in",
        problem,
        f"""<form method="post" action="{LOGIN_PATH}">
<input type="hidden" name="next" value="{html.escape(target, quote=True)}">
<label for="user">User</label>\
<input id="user" name="user" autocomplete="username" required autofocus>
<label for="password">Password</label>
<input id="password" name="password" type="password" autocomplete="current-password" required>
<button>Log in</button></form>""",
    )
