"""Routes that change the queue, which `GET /api/runs` lists together with the runs.

POST /api/queue/resume {run}
    Queues the resume of a run that is over.
POST /api/queue/continue {}
    Continues the queue that was held after a restart.
POST /api/queue/QUEUED/remove {}
    Takes the run out of the queue.
POST /api/queue/QUEUED/up {}
    Moves the run up by one place.
POST /api/queue/QUEUED/detached {detached}
    Sets whether the run is to run in a process of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.runs.setting_differences import queued_differences
from app.server.requests import answering_errors, json_body, switch_of, text_of
from app.session.queue import RunQueue
from app.session.session import Session


def queue_routes(session: Session) -> list[Route]:
    """Returns the routes that change the queue of `session`; each answers the new queue."""
    queue = session.queue

    def changing(path: str, change: Callable[[str, dict[str, Any]], None]) -> Route:
        """Returns a route that passes the queued run's id and the request's body to `change`."""

        async def route(request: Request) -> Response:
            body = await json_body(request)
            await asyncio.to_thread(change, request.path_params.get("queued", ""), body)
            return JSONResponse({"queue": await asyncio.to_thread(queue_rows, queue)})

        return Route(f"/api/queue/{path}", answering_errors(route), methods=["POST"])

    def set_detached(queued: str, body: dict[str, Any]) -> None:
        queue.set_detached(queued, switch_of(body, "detached"))

    def queue_resume(_queued: str, body: dict[str, Any]) -> None:
        session.queue_resume(text_of(body, "run"))

    return [
        changing("resume", queue_resume),
        changing("continue", lambda _queued, _body: queue.go_on()),
        changing("{queued}/remove", lambda queued, _body: queue.remove(queued)),
        changing("{queued}/up", lambda queued, _body: queue.move_up(queued)),
        changing("{queued}/detached", set_detached),
    ]


def queue_rows(queue: RunQueue) -> dict[str, Any]:
    """Returns the queue as the page Runs shows it."""
    listed = queue.listed()
    differences = queued_differences([queued.config for queued in listed])
    rows = [
        {
            "id": queued.id,
            "name": queued.name,
            "model": queued.model,
            "data": queued.data,
            "problem": queued.problem,
            "detached": queued.detached,
            "resumes": queued.resumes,
            "differs": differs,
        }
        for queued, differs in zip(listed, differences)
    ]
    return {
        "rows": rows,
        "held": queue.is_held,
        "behind": queue.behind_name,
        "problem": queue.problem,
    }
