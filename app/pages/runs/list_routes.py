"""Routes that list runs.

GET  /api/runs?search=WORDS&state=STATE&tag=TAG&sort=ORDER&limit=COUNT
    The runs that are asked for, what can be asked for, and the queue.
GET  /api/recent
    The runs of the sidebar: those under way, the latest ones, and the one that is served to other
    programs; and the queue.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.runs.queue_routes import queue_rows
from app.server.requests import answering_errors, count_of
from app.session.session import Session
from app.shared.run_row import NOT_SCANNED, recent_row, recent_runs, run_row
from app.shared.run_table import MOST_SHOWN, ORDERS, SHOWN_AT_FIRST, Asked, choices


def list_routes(session: Session) -> list[Route]:
    """Returns the routes that list the runs of `session`."""
    answers = _ListAnswers(session)
    return [
        Route("/api/runs", answering_errors(answers.runs), methods=["GET"]),
        Route("/api/recent", answering_errors(answers.recent), methods=["GET"]),
    ]


MOST_PINNED = 100


class _ListAnswers:
    """Answers requests about the runs of one session. All file reads happen in threads."""

    def __init__(self, session: Session):
        self._session = session

    async def runs(self, request: Request) -> Response:
        queue = await asyncio.to_thread(queue_rows, self._session.queue)
        table = await asyncio.to_thread(self._table, _asked(request))
        return JSONResponse(table | {"queue": queue})

    def _table(self, asked: Asked) -> dict[str, Any]:
        to_show = self._session.runs_to_show(asked)
        is_busy = self._session.is_busy
        rows = [run_row(at.run, at.weights, at.scan, is_busy) for at in to_show.shown]
        counts = {
            "found": to_show.found,
            "total": len(to_show.every),
            "is_complete": to_show.is_complete,
        }
        return {"runs": rows} | counts | choices(to_show.every)

    async def recent(self, _: Request) -> Response:
        served = self._session.served_id
        runs = recent_runs(await asyncio.to_thread(self._session.runs), served)
        scans, is_complete = await asyncio.to_thread(self._session.scans, runs)
        rows = [recent_row(run, scans.get(run.id, NOT_SCANNED), served) for run in runs]
        queue = await asyncio.to_thread(queue_rows, self._session.queue)
        queued = [{"name": row["name"], "problem": row["problem"]} for row in queue["rows"]]
        return JSONResponse({"runs": rows, "queued": queued, "is_complete": is_complete})


def _asked(request: Request) -> Asked:
    """Returns which runs a request asks for. What it does not name, or wrongly, is left at its
    default.
    """
    given = request.query_params
    sort = given.get("sort", "")
    return Asked(
        search=given.get("search", ""),
        state=given.get("state", ""),
        tag=given.get("tag", ""),
        sort=sort if sort in ORDERS else Asked.sort,
        turned=given.get("turned") == "true",
        pinned=tuple(filter(None, given.get("pinned", "").split(",")))[:MOST_PINNED],
        limit=min(MOST_SHOWN, count_of(given.get("limit", "")) or SHOWN_AT_FIRST),
    )
