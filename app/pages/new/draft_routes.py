"""One route fills the form for a new run with the settings of a run.

POST /api/runs/RUN/draft {changes, trains_on, tab}
    The form of the tab `tab` gets this run's settings with `changes`, which are config values by
    dotted name. With `trains_on`, which may be left out, a new run starts from this run's newest
    weights; a run that is still training, or has no checkpoint, is refused. No run is started. The
    page shows the form when the tab opens it; without `tab`, which may be left out, the next new
    tab does.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.new.checker import Checker
from app.pages.new.draft import settings_of_run
from app.pages.new.form_routes import tab_of
from app.server.requests import answering_errors, json_body, object_of
from app.session.session import Session


def draft_routes(session: Session, checker: Checker) -> list[Route]:
    """Returns the route that makes the settings of a run a draft that `checker` keeps."""

    def fill(run_id: str, changes: dict[str, Any], trains_on: bool, tab: str) -> None:
        shown = settings_of_run(session.runs_dir, run_id, changes, trains_on)
        checker.drafts.remember(tab, None, shown)

    async def draft(request: Request) -> Response:
        body = await json_body(request)
        changes = object_of(body, "changes")
        trains_on = body.get("trains_on") is True
        run_id, tab = request.path_params["run_id"], tab_of(body)
        await asyncio.to_thread(fill, run_id, changes, trains_on, tab)
        return JSONResponse({})

    return [Route("/api/runs/{run_id}/draft", answering_errors(draft), methods=["POST"])]
