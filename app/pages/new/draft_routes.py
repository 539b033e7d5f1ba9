"""Routes that fill the form for a new run: with the settings of a run, or a person's own again.

POST /api/runs/RUN/draft {changes, trains_on, tab}
    The form of the tab `tab` gets this run's settings with `changes`, which are config values by
    dotted name. With `trains_on`, which may be left out, a new run starts from this run's newest
    weights; a run that is still training, or has no checkpoint, is refused. No run is started. The
    page shows the form when the tab opens it; without `tab`, which may be left out, the next new
    tab does.
POST /api/draft/own {tab}
    Answers with the `draft` that the tab `tab` had before its form was filled to continue a run, or
    with the one that a form has at first; it is null where the form continues none so.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.form.settings_form import shown_values
from app.pages.new.checker import Checker
from app.pages.new.draft import settings_of_run
from app.pages.new.form_routes import tab_of
from app.server.requests import answering_errors, json_body, object_of
from app.session.session import Session


def draft_routes(session: Session, checker: Checker) -> list[Route]:
    """Returns the routes of the drafts that `checker` keeps."""
    drafts = checker.drafts

    def fill(run_id: str, changes: dict[str, Any], trains_on: bool, tab: str) -> None:
        shown = settings_of_run(session.runs_dir, run_id, changes, trains_on)
        if trains_on:
            drafts.remember_continuing(tab, shown)
        else:
            drafts.remember(tab, None, shown)

    def own_of(tab: str) -> dict[str, Any] | None:
        if not drafts.is_continuing(tab):
            return None
        listed = checker.presets.listed()
        first = next((each for each in listed.values() if each.config is not None), None)
        key, shown = drafts.own(tab) or (None, None)
        if shown is None and first is not None and first.config is not None:
            key, shown = first.file, shown_values(first.config)
        about = listed[key].about if key in listed else ""
        return None if shown is None else {"preset": key, "about": about, "shown": shown}

    async def draft(request: Request) -> Response:
        body = await json_body(request)
        changes = object_of(body, "changes")
        trains_on = body.get("trains_on") is True
        run_id, tab = request.path_params["run_id"], tab_of(body)
        await asyncio.to_thread(fill, run_id, changes, trains_on, tab)
        return JSONResponse({})

    async def own(request: Request) -> Response:
        tab = tab_of(await json_body(request))
        return JSONResponse({"draft": await asyncio.to_thread(own_of, tab)})

    return [
        Route("/api/runs/{run_id}/draft", answering_errors(draft), methods=["POST"]),
        Route("/api/draft/own", answering_errors(own), methods=["POST"]),
    ]
