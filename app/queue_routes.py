"""Routes of the queue, which `GET /api/runs` lists beside the runs.

    POST /api/queue/continue       {}   what was queued before a restart goes on
    POST /api/queue/QUEUED/remove  {}
    POST /api/queue/QUEUED/up      {}   moves it before the one before it
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.queue import RunQueue
from app.requests import answering_errors, json_body
from app.session import Session


def queue_routes(session: Session) -> list[Route]:
    def changing(change: Callable[[Request], None]) -> Any:
        async def route(request: Request) -> Response:
            await json_body(request)
            await asyncio.to_thread(change, request)
            return JSONResponse({"queue": queue_rows(session.queue)})

        return answering_errors(route)

    queue = session.queue
    return [Route(f"/api/queue/{path}", changing(change), methods=["POST"]) for path, change in (
        ("continue", lambda request: queue.go_on()),
        ("{queued}/remove", lambda request: queue.remove(request.path_params["queued"])),
        ("{queued}/up", lambda request: queue.move_up(request.path_params["queued"])))]


def queue_rows(queue: RunQueue) -> dict[str, Any]:
    """The queue as the Runs tab shows it."""
    rows = [{"id": queued.id, "name": queued.name, "model": queued.model, "data": queued.data, "problem": queued.problem}
            for queued in queue.listed()]
    return {"rows": rows, "held": queue.is_held, "problem": queue.problem}
