"""Routes by which the page starts and ends serving a run.

GET  /api/serve
    The run that is served with the names and the key for clients, and the job that loads weights.
POST /api/serve/start {run_id}
    Starts the job that loads the weights of a run, which is served from then on.
POST /api/serve/stop {}
    Ends all answers and frees the memory.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.server.api_key import ApiKey
from app.server.requests import answering_errors, json_body, text_of
from app.session.serving import Serving
from engine.errors import RunError


def serve_routes(serving: Serving, key: ApiKey | None) -> list[Route]:
    """Returns the routes about `serving`, whose clients need `key`."""

    async def show(_: Request) -> Response:
        state = await asyncio.to_thread(serving.state)
        if state["run_id"] is not None and key is not None:
            state["key"] = await asyncio.to_thread(key.text)
        return JSONResponse(state)

    async def start(request: Request) -> Response:
        run_id = text_of(await json_body(request), "run_id")
        if key is None:
            raise RunError("This server has no key for programs, so it serves none.")
        await asyncio.to_thread(key.text)  # where it cannot be kept, nothing is loaded
        job = await asyncio.to_thread(serving.start, run_id)
        return JSONResponse(job.to_dict())

    async def stop(request: Request) -> Response:
        await json_body(request)
        await asyncio.to_thread(serving.stop)
        return JSONResponse({})

    return [
        Route("/api/serve", answering_errors(show), methods=["GET"]),
        Route("/api/serve/start", answering_errors(start), methods=["POST"]),
        Route("/api/serve/stop", answering_errors(stop), methods=["POST"]),
    ]
