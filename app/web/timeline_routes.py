"""These are the routes of the timelines of a run. Without N it is the latest step that has one.

    GET /api/runs/RUN/timeline[?step=N]                  the figure of a step, as the page draws it
    GET /api/runs/RUN/stretch[?step=N]&from=US&to=US     the figure of these microseconds alone
    GET /api/runs/RUN/trace[?step=N]                     the step as a file for ui.perfetto.dev

A stretch shows more detail than the figure of the whole step. chrome://tracing reads a trace too.
"""

from __future__ import annotations

import asyncio
import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.session.session import Session
from app.view.spans import Window
from app.view.timeline_figure import timeline_figure, timeline_part
from app.web.requests import answering_errors, count_of
from engine.errors import RunError
from engine.runs.trace import trace_name, trace_of


def timeline_routes(session: Session) -> list[Route]:
    async def timeline(request: Request) -> Response:
        timelines, step = session.watch(request.path_params["run_id"]).timelines, _step_of(request)
        return JSONResponse(await asyncio.to_thread(lambda: timeline_part(*timelines.read(step))))

    async def part(request: Request) -> Response:
        timelines, step, window = (
            session.watch(request.path_params["run_id"]).timelines,
            _step_of(request),
            _window_of(request),
        )
        return JSONResponse(
            await asyncio.to_thread(lambda: timeline_figure(*timelines.read(step), window))
        )

    async def trace(request: Request) -> Response:
        run_id, step = request.path_params["run_id"], _step_of(request)
        timelines = session.watch(run_id).timelines

        def work() -> tuple[str, bytes]:
            found, simulated = timelines.read(step)
            text = json.dumps(trace_of(run_id, found, simulated), separators=(",", ":"))
            return trace_name(run_id, found.step), text.encode()

        name, body = await asyncio.to_thread(work)
        return Response(
            body,
            media_type="application/json",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )

    return [
        Route("/api/runs/{run_id}/timeline", answering_errors(timeline)),
        Route("/api/runs/{run_id}/stretch", answering_errors(part)),
        Route("/api/runs/{run_id}/trace", answering_errors(trace)),
    ]


def _step_of(request: Request) -> int | None:
    """None for the latest. Raises RunError for what is no step."""
    asked = request.query_params.get("step")
    step = None if asked is None else count_of(asked)
    if asked is not None and step is None:
        raise RunError(f"step: {asked[:40]!r} is not the number of a step.")
    return step


def _window_of(request: Request) -> Window:
    """Seconds. Raises RunError for what is no stretch of time. One that begins before the step's
    first op is below 0.
    """
    ends = []
    for name in ("from", "to"):
        asked = request.query_params.get(name, "")
        microseconds = count_of(asked.removeprefix("-"))
        if microseconds is None:
            raise RunError(f"{name}: {asked[:40]!r} is not a number of microseconds.")
        ends.append(1e-6 * (-microseconds if asked.startswith("-") else microseconds))
    if ends[0] >= ends[1]:
        raise RunError("The stretch of the step ends before it begins; from must be below to.")
    return ends[0], ends[1]
