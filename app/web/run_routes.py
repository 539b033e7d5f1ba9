"""Routes of runs.

GET  /api/live[/RUN]?since=SEQ&axis=AXIS        what the page draws (over step, time or tokens);
without RUN, which
                                                run to open
GET  /api/runs                                  every run, and the queue GET  /api/runs/RUN/details
its name and note, its settings, and command lines for them POST /api/runs/RUN/control   {command,
seen}    stop, discard, pause, resume or save; the state in which it was asked POST
/api/runs/RUN/describe  {name, note}       what it is called, and what there is to say of it POST
/api/runs/RUN/change    {values}           another learning rate or number of steps POST
/api/runs/RUN/delete    {}                 deletes its folder POST /api/runs/RUN/export    {folder}
starts a job
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.run_details import run_details
from app.session.session import Session
from app.view.axes import AXES
from app.view.run_row import run_row
from app.web.queue_routes import queue_rows
from app.web.requests import answering_errors, count_of, json_body, text_of
from engine.config.changes import Change
from engine.runs.folder import open_run


def run_routes(session: Session) -> list[Route]:
    async def which_run(request: Request) -> Response:
        run_id = await asyncio.to_thread(session.run_to_open)
        return JSONResponse(
            {"server_id": session.server_id, "active": session.busy_id, "run_id": run_id}
        )

    async def live(request: Request) -> Response:
        since = count_of(request.query_params.get("since", "")) or 0
        axis = request.query_params.get("axis")
        watch = session.watch(request.path_params["run_id"])
        body = await watch.answer(since, axis if axis in AXES else "step")
        busy = await asyncio.to_thread(lambda: session.busy_id)
        server = json.dumps({"server_id": session.server_id, "active": busy}).encode()
        return Response(server[:-1] + b"," + body + b"}", media_type="application/json")

    async def runs(request: Request) -> Response:
        def rows() -> list[dict[str, Any]]:
            return [run_row(run, can_talk) for run, can_talk in session.runs_to_show()]

        queue = await asyncio.to_thread(queue_rows, session.queue)
        return JSONResponse({"runs": await asyncio.to_thread(rows), "queue": queue})

    async def details(request: Request) -> Response:
        folder = open_run(session.runs_dir, request.path_params["run_id"])
        return JSONResponse(await asyncio.to_thread(run_details, folder))

    async def describe(request: Request) -> Response:
        body = await json_body(request)
        about = await asyncio.to_thread(
            session.describe,
            request.path_params["run_id"],
            text_of(body, "name"),
            text_of(body, "note"),
        )
        return JSONResponse({"name": about.name, "note": about.note})

    async def control(request: Request) -> Response:
        body = await json_body(request)
        seen = text_of(body, "seen") if "seen" in body else ""
        run_id = await asyncio.to_thread(
            session.request, request.path_params["run_id"], text_of(body, "command"), seen
        )
        return JSONResponse({"run_id": run_id})

    async def change(request: Request) -> Response:
        asked = Change.from_dict((await json_body(request)).get("values"))
        return JSONResponse(
            {
                "run_id": await asyncio.to_thread(
                    session.change, request.path_params["run_id"], asked
                )
            }
        )

    async def delete(request: Request) -> Response:
        await json_body(request)
        await asyncio.to_thread(session.delete, request.path_params["run_id"])
        return JSONResponse({})

    async def export(request: Request) -> Response:
        body = await json_body(request)
        job = session.export(request.path_params["run_id"], text_of(body, "folder"))
        return JSONResponse(job.to_dict())

    get, post = ["GET"], ["POST"]
    return [
        Route(path, answering_errors(route), methods=methods)
        for path, route, methods in (
            ("/api/live", which_run, get),
            ("/api/live/{run_id}", live, get),
            ("/api/runs", runs, get),
            ("/api/runs/{run_id}/details", details, get),
            ("/api/runs/{run_id}/describe", describe, post),
            ("/api/runs/{run_id}/control", control, post),
            ("/api/runs/{run_id}/change", change, post),
            ("/api/runs/{run_id}/delete", delete, post),
            ("/api/runs/{run_id}/export", export, post),
        )
    ]
