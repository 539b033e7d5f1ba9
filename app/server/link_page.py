"""The page of a server without a password for those it does not know: what its owner does to let
them in.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from app.server.links import command_for_others
from app.server.login import LINK_USED, LOGIN_PATH, Login
from app.server.login_style import framed
from app.server.peers import Account

USED = (
    "That link does not work: it was already used, has expired, or the server was started again "
    "since."
)
_TITLES = {
    Account.ANOTHER: "This app belongs to another account",
    Account.UNKNOWN: "This app cannot see whose browser this is",
}
_REASONS = {
    Account.ANOTHER: "The account of this machine that has started it gets in by itself. Others "
    "get in by a link that works once, which its owner gives them. The owner types in a terminal:",
    Account.UNKNOWN: "The account that has started it gets in by itself, on the machine itself "
    "and by SSH. This browser comes in another way, such as from a container or another system. "
    "The owner gets a link for it, which works once, by typing in a terminal:",
}


def link_routes(login: Login) -> list[Route]:
    """Returns the route of the page."""

    async def page(request: Request) -> Response:
        account = login.account_of(request.scope)
        if account is Account.OWNER or login.session_of(request.scope) is not None:
            return RedirectResponse("/", 303)
        problem = USED if LINK_USED in request.query_params else login.sessions.fault
        return HTMLResponse(_page(account, problem), status_code=401)

    return [Route(LOGIN_PATH, page, methods=["GET"])]


def _page(account: Account, problem: str) -> str:
    title = _TITLES[account]
    return framed(
        title,
        problem,
        f"""<h2>{title}</h2>
<p>{_REASONS[account]}</p>
<code>{command_for_others()}</code>
<form method="get" action="/">
<label for="token">Link</label>
<input id="token" name="token" autocomplete="off" spellcheck="false" required autofocus>
<button>Open</button></form>
<small>Whoever is let in can do all that the owner can: start, delete and export runs, and read \
the owner's files. This browser then stays in for two weeks.</small>""",
        is_wide=True,
    )
