"""Routes of runs and of jobs.

    GET  /api/live[/RUN]?since=SEQ&axis=AXIS        what the page draws (over step, time or tokens); without RUN, which
                                                    run to open
    GET  /api/runs                                  every run, and the queue
    GET  /api/runs/RUN/details                      its name and note, its settings, and command lines for them
    GET  /api/jobs/N                                an export or an answer
    POST /api/runs/RUN/control   {command}          stop, discard, pause, resume or save
    POST /api/runs/RUN/describe  {name, note}       what it is called, and what there is to say of it
    POST /api/runs/RUN/change    {values}           another learning rate or number of steps
    POST /api/runs/RUN/delete    {}                 deletes its folder
    POST /api/runs/RUN/export    {folder}           starts a job
    POST /api/runs/RUN/ask       {prompt, ...}      starts a job
"""

from __future__ import annotations

import asyncio
import json

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.axes import AXES
from app.queue_routes import queue_rows
from app.requests import answering_errors, json_body, number_of, text_of
from app.run_details import run_details
from app.session import Session
from app.view import run_row
from engine.changes import Change
from engine.errors import RunError
from engine.runs import open_run

MAX_NEW_TOKENS = 2048


def run_routes(session: Session) -> list[Route]:
    async def which_run(request: Request) -> Response:
        run_id = await asyncio.to_thread(session.run_to_open)
        return JSONResponse({"server_id": session.server_id, "active": session.busy_id, "run_id": run_id})

    async def live(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        axis = request.query_params.get("axis")
        watch = session.watch(request.path_params["run_id"])
        body = await watch.answer(int(since) if since.isdecimal() else 0, axis if axis in AXES else "step")
        busy = await asyncio.to_thread(lambda: session.busy_id)
        server = json.dumps({"server_id": session.server_id, "active": busy}).encode()
        return Response(server[:-1] + b"," + body + b"}", media_type="application/json")

    async def runs(request: Request) -> Response:
        listed = await asyncio.to_thread(session.runs)
        return JSONResponse({"runs": [run_row(run) for run in listed], "queue": queue_rows(session.queue)})

    async def details(request: Request) -> Response:
        folder = open_run(session.runs_dir, request.path_params["run_id"])
        return JSONResponse(await asyncio.to_thread(run_details, folder))

    async def describe(request: Request) -> Response:
        body = await json_body(request)
        about = await asyncio.to_thread(session.describe, request.path_params["run_id"], text_of(body, "name"),
                                        text_of(body, "note"))
        return JSONResponse({"name": about.name, "note": about.note})

    async def control(request: Request) -> Response:
        command = text_of(await json_body(request), "command")
        run_id = await asyncio.to_thread(session.request, request.path_params["run_id"], command)
        return JSONResponse({"run_id": run_id})

    async def change(request: Request) -> Response:
        asked = Change.from_dict((await json_body(request)).get("values"))
        return JSONResponse({"run_id": await asyncio.to_thread(session.change, request.path_params["run_id"], asked)})

    async def delete(request: Request) -> Response:
        await asyncio.to_thread(session.delete, request.path_params["run_id"])
        return JSONResponse({})

    async def export(request: Request) -> Response:
        body = await json_body(request)
        job = session.export(request.path_params["run_id"], text_of(body, "folder"))
        return JSONResponse(job.to_dict())

    async def ask(request: Request) -> Response:
        body = await json_body(request)
        tokens = number_of(body, "max_new_tokens", 64, 1, MAX_NEW_TOKENS)
        job = session.ask(request.path_params["run_id"], text_of(body, "prompt"), int(tokens),
                          number_of(body, "temperature", 0.0, 0.0, 5.0), number_of(body, "top_p", 1.0, 0.01, 1.0))
        return JSONResponse(job.to_dict())

    async def job(request: Request) -> Response:
        found = session.jobs.find(request.path_params["number"])
        if found is None:
            raise RunError("There is no such job; it may have been started before the program was restarted.")
        return JSONResponse(found.to_dict())

    get, post = ["GET"], ["POST"]
    return [Route(path, answering_errors(route), methods=methods) for path, route, methods in (
        ("/api/live", which_run, get), ("/api/live/{run_id}", live, get), ("/api/runs", runs, get),
        ("/api/runs/{run_id}/details", details, get), ("/api/runs/{run_id}/describe", describe, post),
        ("/api/runs/{run_id}/control", control, post), ("/api/runs/{run_id}/change", change, post),
        ("/api/runs/{run_id}/delete", delete, post),
        ("/api/runs/{run_id}/export", export, post), ("/api/runs/{run_id}/ask", ask, post),
        ("/api/jobs/{number:int}", job, get))]
