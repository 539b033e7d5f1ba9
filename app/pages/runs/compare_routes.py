"""One route compares several runs.

GET /api/compare?runs=A,B&axis=step|time&baseline=A
    The curves, key figures and differing settings of 2 to 6 runs, and how the figures differ from
    those of the baseline.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.runs.compare import Records
from app.pages.runs.comparison import Axis
from app.server.requests import answering_errors
from app.session.session import Session
from engine.runs.record.run_folder import RunFolder, open_run


def compare_routes(session: Session) -> list[Route]:
    """Returns the route that compares runs of `session`."""
    records = Records()

    def is_running(folder: RunFolder) -> bool:
        return folder.is_running() or session.is_about_to_run(folder)

    def comparison_of(names: list[str], axis: str, baseline: str) -> dict[str, Any]:
        folders = [open_run(session.runs_dir, name) for name in names]
        by: Axis = "time" if axis == "time" else "step"
        return records.compare(folders, by, is_running, baseline)

    async def compare(request: Request) -> Response:
        asked = request.query_params.get("runs", "").split(",")
        names = list(dict.fromkeys(name for name in asked if name))
        axis = request.query_params.get("axis", "")
        baseline = request.query_params.get("baseline", "")
        return JSONResponse(await asyncio.to_thread(comparison_of, names, axis, baseline))

    return [Route("/api/compare", answering_errors(compare), methods=["GET"])]
