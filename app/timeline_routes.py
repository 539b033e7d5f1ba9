"""Routes of the timelines of a run.

    GET /api/runs/RUN/timeline[?step=N]   the figure of a sampled step (the latest), as the page draws it
    GET /api/runs/RUN/trace[?step=N]      the same step as a file for ui.perfetto.dev and chrome://tracing
"""

from __future__ import annotations

import asyncio
import json
import re

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.requests import answering_errors
from app.session import Session
from app.timeline import timeline_part
from engine.errors import RunError
from engine.trace import trace_name, trace_of

_STEP = re.compile(r"[0-9]{1,15}")


def timeline_routes(session: Session) -> list[Route]:
    async def timeline(request: Request) -> Response:
        sampled, step = session.watch(request.path_params["run_id"]).sampled, _step_of(request)
        return JSONResponse(await asyncio.to_thread(lambda: timeline_part(*sampled.read(step))))

    async def trace(request: Request) -> Response:
        run_id, step = request.path_params["run_id"], _step_of(request)
        sampled = session.watch(run_id).sampled

        def work() -> tuple[str, bytes]:
            found, simulated = sampled.read(step)
            text = json.dumps(trace_of(run_id, found, simulated), separators=(",", ":"))
            return trace_name(run_id, found.step), text.encode()

        name, body = await asyncio.to_thread(work)
        return Response(body, media_type="application/json", headers={"content-disposition": f'attachment; filename="{name}"'})

    return [Route("/api/runs/{run_id}/timeline", answering_errors(timeline)),
            Route("/api/runs/{run_id}/trace", answering_errors(trace))]


def _step_of(request: Request) -> int | None:
    """None for the latest. Raises RunError for what is no step."""
    step = request.query_params.get("step")
    if step is not None and not _STEP.fullmatch(step):
        raise RunError(f"step: {step[:40]!r} is not the number of a step.")
    return None if step is None else int(step)
