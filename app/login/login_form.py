"""Shows the login form and checks what is entered, within the limits on wrong passwords."""

from __future__ import annotations

import asyncio
import html
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from app.login.attempts import FORGOTTEN_SECONDS, Attempts
from app.login.clients import client_of
from app.login.login import LINK_USED, LOGIN_PATH, Login

WRONG_PASSWORD_SECONDS = 0.5


def login_routes(login: Login) -> list[Route]:
    """Returns the GET and POST routes of the login form."""
    attempts = Attempts()

    async def form(request: Request) -> Response:
        problem = ""
        if LINK_USED in request.query_params:
            problem = (
                "That link was already used, or the server was started again since. Please log in."
            )
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


# A backslash at the end of a line joins it to the next one.
_STYLE = """\
:root { color-scheme: light dark; --page: #f5f6f8; --card: #fff; --text: #1c2330; \
--line: #7b8494; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --page: #11151c; --card: #1a202a; --text: #e8ebf0; --line: #7b8698; --bad: #ff9c94 } }
body { margin: 0; min-height: 100vh; display: grid; place-items: center; \
background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif }
form { background: var(--card); padding: 28px 32px; border-radius: 12px; width: min(300px, 80vw) }
h1 { font-size: 20px; margin: 0 0 16px; display: flex; align-items: center; gap: 10px }
h1 rect { fill: #2257c9 } h1 path { stroke: #fff; stroke-width: 3; stroke-linecap: round }
label { display: block; margin: 12px 0 4px } \
p { color: var(--bad) }
input { width: 100%; box-sizing: border-box; padding: 9px 10px; font: inherit; \
border: 1px solid var(--line);
  border-radius: 8px; background: var(--page); color: inherit }
button { margin-top: 20px; width: 100%; padding: 10px; font: inherit; font-weight: 600; \
border: 0; border-radius: 8px;
  background: #2257c9; color: #fff; cursor: pointer }
"""

_LOGO = """\
<svg width="28" height="28" viewBox="0 0 32 32" aria-hidden="true">\
<rect width="32" height="32" rx="8"></rect><path d="M7 10h10M7 16h14M7 22h7"></path>\
<path d="M20 10h5M24 16h1M17 22h8" opacity=".45"></path></svg>"""


def _page(target: str, problem: str) -> str:
    """Returns the form, which leads to `target`. If there is a `problem`, it is shown above the
    form.
    """
    note = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8">\
<title>Log in – Ramstream</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
{_STYLE}</style></head><body><form method="post" action="{LOGIN_PATH}">\
<h1>{_LOGO}Ramstream</h1>{note}
<input type="hidden" name="next" value="{html.escape(target, quote=True)}">
<label for="user">User</label>\
<input id="user" name="user" autocomplete="username" required autofocus>
<label for="password">Password</label>
<input id="password" name="password" type="password" autocomplete="current-password" required>
<button>Log in</button></form></body></html>"""
