"""One route fills the Train form with the settings of a run.

POST /api/runs/RUN/draft {changes}
    The form gets this run's settings with `changes`, which are config values by dotted name.
    No run is started. The next page that is opened shows the form.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.checker import Checker
from app.pages.draft import settings_of_run
from app.session.session import Session
from app.web.requests import answering_errors, json_body, object_of


def draft_routes(session: Session, checker: Checker) -> list[Route]:
    """Returns the route that makes the settings of a run the draft that `checker` keeps."""

    def fill(run_id: str, changes: dict[str, Any]) -> None:
        checker.draft.remember(None, settings_of_run(session.runs_dir, run_id, changes))

    async def draft(request: Request) -> Response:
        changes = object_of(await json_body(request), "changes")
        await asyncio.to_thread(fill, request.path_params["run_id"], changes)
        return JSONResponse({})

    return [Route("/api/runs/{run_id}/draft", answering_errors(draft), methods=["POST"])]
