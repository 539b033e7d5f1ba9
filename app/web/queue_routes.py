"""Routes of the queue, which `GET /api/runs` lists beside the runs.

POST /api/queue/continue         {}          what was queued before a restart goes on
POST /api/queue/QUEUED/remove    {}
POST /api/queue/QUEUED/up        {}          moves it before the one before it
POST /api/queue/QUEUED/detached  {detached}  whether it is to be run in a process of its own
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.session.queue import RunQueue
from app.session.session import Session
from app.web.requests import answering_errors, json_body, switch_of


def queue_routes(session: Session) -> list[Route]:
    def changing(change: Callable[[str, dict[str, Any]], None]) -> Any:
        async def route(request: Request) -> Response:
            body = await json_body(request)
            await asyncio.to_thread(change, request.path_params.get("queued", ""), body)
            return JSONResponse({"queue": await asyncio.to_thread(queue_rows, session.queue)})

        return answering_errors(route)

    queue = session.queue
    return [
        Route(f"/api/queue/{path}", changing(change), methods=["POST"])
        for path, change in (
            ("continue", lambda queued, body: queue.go_on()),
            ("{queued}/remove", lambda queued, body: queue.remove(queued)),
            ("{queued}/up", lambda queued, body: queue.move_up(queued)),
            (
                "{queued}/detached",
                lambda queued, body: queue.set_detached(queued, switch_of(body, "detached")),
            ),
        )
    ]


def queue_rows(queue: RunQueue) -> dict[str, Any]:
    """The queue as the Runs tab shows it."""
    rows = [
        {
            "id": queued.id,
            "name": queued.name,
            "model": queued.model,
            "data": queued.data,
            "problem": queued.problem,
            "detached": queued.detached,
        }
        for queued in queue.listed()
    ]
    return {
        "rows": rows,
        "held": queue.is_held,
        "behind": queue.behind or "",
        "problem": queue.problem,
    }
