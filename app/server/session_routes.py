"""Routes that list the browsers that are logged in, log out, and end the sessions of others.

They do not exist with --no-login. The guard lets only our own pages send to them. The owner, whose
programs need no session, has none of the sessions that are listed.

- GET /api/sessions answers with `{user, now, sessions}`, where a session is `{name, began, seen,
  address, browser, is_own}`; times are in seconds since 1970.
- POST /api/sessions/logout {} ends the session of who asks.
- POST /api/sessions/end {name} ends another one, and POST /api/sessions/end_others {} all others.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.server.login import Login, forgotten_cookie
from app.server.login_sessions import LoginSession
from app.server.requests import answering_errors, json_body, text_of
from engine.errors import RunError


def session_routes(login: Login) -> list[Route]:
    """Returns the routes about the sessions of a login."""

    def own(request: Request) -> LoginSession | None:
        session = login.session_of(request.scope)
        if session is None and not login.is_owners(request.scope):
            # It ended while the request was under way.
            raise RunError("You are logged out; log in again.")
        return session

    async def show(request: Request) -> Response:
        return JSONResponse(_listed(login, own(request)))

    async def logout(request: Request) -> Response:
        await json_body(request)
        session = own(request)
        if session is None:
            raise RunError("This browser is let in by its account, so it cannot log out.")
        login.sessions.end(session.name)
        return JSONResponse(
            {"logged_out": True}, headers={"set-cookie": forgotten_cookie(request.scope)}
        )

    async def end(request: Request) -> Response:
        name = text_of(await json_body(request), "name")
        session = own(request)
        if session is not None and name == session.name:
            raise RunError("This is your own session; log out instead.")
        if not login.sessions.end(name):
            raise RunError("This session is over already.")
        return JSONResponse(_listed(login, session))

    async def end_others(request: Request) -> Response:
        await json_body(request)
        session = own(request)
        login.sessions.end_others(session)
        return JSONResponse(_listed(login, session))

    sent = {"logout": logout, "end": end, "end_others": end_others}
    return [
        Route("/api/sessions", answering_errors(show)),
        *(
            Route(f"/api/sessions/{name}", answering_errors(route), methods=["POST"])
            for name, route in sent.items()
        ),
    ]


def _listed(login: Login, own: LoginSession | None) -> dict[str, Any]:
    """Returns all sessions in force, that of who asks first."""
    sessions = sorted(login.sessions.all(), key=lambda each: each is not own)
    return {
        "user": login.user,
        "now": time.time(),
        "fault": login.sessions.fault,
        "sessions": [
            {
                "name": session.name,
                "began": session.record.began,
                "seen": session.record.seen,
                "address": session.record.address,
                "browser": session.record.browser,
                "is_own": session is own,
            }
            for session in sessions
        ],
    }
