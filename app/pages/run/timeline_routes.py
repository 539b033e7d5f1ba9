"""Routes that show the timelines of a run.

GET /api/runs/RUN/timeline[?step=N][&rank=R|all]
    The figure of a sampled step, as the page draws it; without N, of the latest one. With several
    ranks it is that of rank R or, without R, of rank 0.
GET /api/runs/RUN/stretch[?step=N][&rank=R|all]&from=US&to=US
    The figure of only this stretch of the step (microseconds), in more detail.
GET /api/runs/RUN/trace[?step=N]
    The same step, on all ranks, as a file for ui.perfetto.dev and chrome://tracing.
"""

from __future__ import annotations

import asyncio
import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.run.rank_figure import ALL_RANKS, stretch_figure, timeline_part
from app.pages.run.run_watch import watch_of
from app.pages.run.spans import Window
from app.server.requests import answering_errors, count_of
from app.session.session import Session
from engine.errors import RunError
from engine.runs.record.trace import trace_name, trace_of


def timeline_routes(session: Session) -> list[Route]:
    """Returns the routes that show sampled steps of runs of `session`."""

    async def timeline(request: Request) -> Response:
        timelines = watch_of(session, request.path_params["run_id"]).timelines
        step, rank = _step_of(request), _rank_of(request)
        return JSONResponse(
            await asyncio.to_thread(lambda: timeline_part(*timelines.read(step), rank))
        )

    async def stretch(request: Request) -> Response:
        timelines = watch_of(session, request.path_params["run_id"]).timelines
        step, rank = _step_of(request), _rank_of(request)
        window = _window_of(request)
        return JSONResponse(
            await asyncio.to_thread(lambda: stretch_figure(*timelines.read(step), window, rank))
        )

    async def trace(request: Request) -> Response:
        run_id = request.path_params["run_id"]
        step = _step_of(request)
        timelines = watch_of(session, run_id).timelines

        def name_and_content() -> tuple[str, bytes]:
            found, simulated = timelines.read(step)
            text = json.dumps(trace_of(run_id, found, simulated), separators=(",", ":"))
            return trace_name(run_id, found.step), text.encode()

        name, content = await asyncio.to_thread(name_and_content)
        return Response(
            content,
            media_type="application/json",
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )

    return [
        Route("/api/runs/{run_id}/timeline", answering_errors(timeline)),
        Route("/api/runs/{run_id}/stretch", answering_errors(stretch)),
        Route("/api/runs/{run_id}/trace", answering_errors(trace)),
    ]


def _step_of(request: Request) -> int | None:
    """Returns the requested step, or None for the latest.

    Raises RunError if the parameter is not a step.
    """
    asked = request.query_params.get("step")
    if asked is None:
        return None
    step = count_of(asked)
    if step is None:
        raise RunError(f"step: {asked[:40]!r} is not the number of a step.")
    return step


def _rank_of(request: Request) -> int:
    """Returns the requested rank, or `ALL_RANKS`. Raises RunError if the parameter is neither."""
    asked = request.query_params.get("rank", "0")
    rank = ALL_RANKS if asked == "all" else count_of(asked)
    if rank is None:
        raise RunError(f"rank: {asked[:40]!r} is neither the number of a rank nor all.")
    return rank


def _window_of(request: Request) -> Window:
    """Returns the start and end of the requested stretch, in seconds.

    A stretch that begins before the step's first op has a negative start. Raises RunError if the
    parameters are not a stretch of time.
    """
    start, end = _seconds_of(request, "from"), _seconds_of(request, "to")
    if start >= end:
        raise RunError("The stretch of the step ends before it begins; from must be below to.")
    return start, end


def _seconds_of(request: Request, name: str) -> float:
    """Returns parameter `name`, given in microseconds, in seconds. Raises RunError if it is
    invalid.
    """
    asked = request.query_params.get(name, "")
    microseconds = count_of(asked.removeprefix("-"))
    if microseconds is None:
        raise RunError(f"{name}: {asked[:40]!r} is not a number of microseconds.")
    return 1e-6 * (-microseconds if asked.startswith("-") else microseconds)
