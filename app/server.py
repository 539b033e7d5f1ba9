"""The web server: our own routes, then Gradio's pages, all behind the guard.

    GET  /api/live[/RUN]?since=SEQ&axis=step|time   what the page draws; without RUN, which run to open
    GET  /api/runs                                  every run
    GET  /api/jobs/N                                an export or an answer
    POST /api/check              {preset, shown}    the verdict of the form, which is kept as the draft
    POST /api/runs/RUN/control   {command}          stop, discard, pause, resume or save
    POST /api/runs/RUN/delete    {}                 deletes its folder
    POST /api/runs/RUN/export    {folder}           starts a job
    POST /api/runs/RUN/ask       {prompt, ...}      starts a job
    GET  /api/hardware[/choices]                    this machine; what the Hardware tab offers
    POST /api/hardware/column    {machine, timed, settings}            one machine of the table of models
    POST /api/hardware/csv       {machines, models, settings}          rows of that table as a file
    POST /api/hardware/largest, /api/hardware/offers {[model,] settings} the largest model; the machines for a model
    POST /api/hardware/measure, /api/hardware/cancel {}                 starts a job; ends it

Requests about runs and the form answer 200 with JSON, or 4xx with `{"error": sentence}`.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from app.check import Checker
from app.form import settings
from app.guard import Guard, GuardPolicy
from app.hardware import Hardware, choices
from app.login import login_routes
from app.session import Session
from app.view import run_row
from engine.errors import RamstreamError, RunError
from engine.paths import PROGRAM_ROOT

ASSETS = PROGRAM_ROOT / "assets"
PAGE_FILES = {"dashboard.js": "text/javascript", "charts.js": "text/javascript", "train.js": "text/javascript",
              "runs.js": "text/javascript", "hardware.js": "text/javascript", "dom.js": "text/javascript",
              "dashboard.css": "text/css"}
FOREVER = "public, max-age=31536000, immutable"
MAX_NEW_TOKENS = 2048


def build_app(session: Session, checker: Checker, page: gr.Blocks, policy: GuardPolicy, **mount: Any) -> FastAPI:
    """The whole ASGI application. `mount` is passed to Gradio (theme and css)."""
    routes = _file_routes() + _run_routes(session) + _check_routes(checker) + _hardware_routes(Hardware(session))
    if policy.login is not None:
        routes += login_routes(policy.login)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, middleware=[Middleware(Guard, policy=policy)],
                  routes=routes)
    app = gr.mount_gradio_app(app, page, path="/", head=_head(), ssr_mode=False, run_history=False, show_error=False,
                              enable_monitoring=False, footer_links=[], pwa=False, mcp_server=False, **mount)
    # Gradio looks for work a thousand times a second; twenty times is quick enough and leaves the CPU to the run.
    page._queue.sleep_when_free = 0.05
    page._queue.progress_update_sleep_when_free = 0.1
    return app


# ------------------------------------------------------------------ files of the page


def _head() -> str:
    return (f'<link rel="stylesheet" href="/ramstream/dashboard.css"><meta name="ramstream-plotly" '
            f'content="{plotly_address()}"><script type="module" src="/ramstream/dashboard.js"></script>')


@functools.cache
def _plotly() -> tuple[bytes, str]:
    """plotly.js of the installed package, and a name for this version of it."""
    from plotly.offline import get_plotlyjs

    text = get_plotlyjs().encode()
    return gzip.compress(text, 5), hashlib.sha256(text).hexdigest()[:12]


def plotly_address() -> str:
    return f"/ramstream/plotly-{_plotly()[1]}.js"


def _file_routes() -> list[Route]:
    async def plotly(request: Request) -> Response:
        return Response(_plotly()[0], media_type="text/javascript",
                        headers={"cache-control": FOREVER, "content-encoding": "gzip"})

    async def page_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in PAGE_FILES:
            return JSONResponse({"error": "There is no such file."}, 404)
        # Checked with the server at each load: a new version of the program must not meet old scripts.
        return FileResponse(ASSETS / name, media_type=PAGE_FILES[name], headers={"cache-control": "no-cache"})

    return [Route(plotly_address(), plotly), Route("/ramstream/{name}", page_file)]


# ------------------------------------------------------------------ runs and jobs


def _run_routes(session: Session) -> list[Route]:
    async def which_run(request: Request) -> Response:
        run_id = await asyncio.to_thread(session.run_to_open)
        return JSONResponse({"server_id": session.server_id, "active": session.active_id, "run_id": run_id})

    async def live(request: Request) -> Response:
        since = request.query_params.get("since", "0")
        axis = "time" if request.query_params.get("axis") == "time" else "step"
        watch = session.watch(request.path_params["run_id"])
        body = await watch.answer(int(since) if since.isdecimal() else 0, axis)
        server = json.dumps({"server_id": session.server_id, "active": session.active_id}).encode()
        return Response(server[:-1] + b"," + body + b"}", media_type="application/json")

    async def runs(request: Request) -> Response:
        return JSONResponse({"runs": [run_row(run) for run in await asyncio.to_thread(session.runs)]})

    async def control(request: Request) -> Response:
        command = _text(await _json(request), "command")
        run_id = await asyncio.to_thread(session.request, request.path_params["run_id"], command)
        return JSONResponse({"run_id": run_id})

    async def delete(request: Request) -> Response:
        await asyncio.to_thread(session.delete, request.path_params["run_id"])
        return JSONResponse({})

    async def export(request: Request) -> Response:
        body = await _json(request)
        job = session.export(request.path_params["run_id"], _text(body, "folder"))
        return JSONResponse(job.to_dict())

    async def ask(request: Request) -> Response:
        body = await _json(request)
        tokens = _number(body, "max_new_tokens", 64, 1, MAX_NEW_TOKENS)
        job = session.ask(request.path_params["run_id"], _text(body, "prompt"), int(tokens),
                          _number(body, "temperature", 0.0, 0.0, 5.0), _number(body, "top_p", 1.0, 0.01, 1.0))
        return JSONResponse(job.to_dict())

    async def job(request: Request) -> Response:
        found = session.jobs.find(request.path_params["number"])
        if found is None:
            raise RunError("There is no such job; it may have been started before the program was restarted.")
        return JSONResponse(found.to_dict())

    get, post = ["GET"], ["POST"]
    return [Route(path, _answering_errors(route), methods=methods) for path, route, methods in (
        ("/api/live", which_run, get), ("/api/live/{run_id}", live, get), ("/api/runs", runs, get),
        ("/api/runs/{run_id}/control", control, post), ("/api/runs/{run_id}/delete", delete, post),
        ("/api/runs/{run_id}/export", export, post), ("/api/runs/{run_id}/ask", ask, post),
        ("/api/jobs/{number:int}", job, get))]


# ------------------------------------------------------------------ the form


def _check_routes(checker: Checker) -> list[Route]:
    """Beside Gradio's events: its queue, and the copies that its page makes of an answer, took longer than the estimate."""
    async def check(request: Request) -> Response:
        body = await _json(request)
        preset = _text(body, "preset") if body.get("preset") is not None else None
        return JSONResponse(await asyncio.to_thread(checker.check, preset, _shown(body)))

    return [Route("/api/check", _answering_errors(check), methods=["POST"])]


def _shown(body: dict[str, Any]) -> dict[str, Any]:
    """The value of every component of the form, by dotted name."""
    shown, known = _object(body, "shown"), {setting.dotted: setting for setting in settings()}
    for name in [*known, *shown]:
        if name not in shown:
            raise RunError(f"shown: {name} is missing.")
        if name not in known:
            raise RunError(f"shown: {name!r} is not a setting.")
        if not known[name].holds(shown[name]):
            raise RunError(f"shown: {name} is not {'true or false' if known[name].kind == 'switch' else 'a text'}.")
    return shown


# ------------------------------------------------------------------ hardware


def _hardware_routes(hardware: Hardware) -> list[Route]:
    def answered(method: str, path: str, work: Callable[[dict[str, Any]], dict[str, Any]]) -> Route:
        """A route that computes in a thread: what it does takes up to seconds."""
        async def route(request: Request) -> Response:
            body = {} if method == "GET" else await _json(request)
            return JSONResponse(await asyncio.to_thread(work, body))

        return Route(f"/api/hardware{path}", _answering_errors(route), methods=[method])

    def cancel(_: dict[str, Any]) -> dict[str, Any]:
        hardware.cancel()
        return {}

    return [
        answered("GET", "", lambda _: hardware.about()),
        answered("GET", "/choices", lambda _: choices()),
        answered("POST", "/column", lambda body: hardware.column(_object(body, "settings"), _text(body, "machine"),
                                                                 body.get("timed") is True)),
        answered("POST", "/csv", lambda body: {"csv": hardware.csv(_object(body, "settings"), _texts(body, "machines"),
                                                                   _texts(body, "models"))}),
        answered("POST", "/largest", lambda body: hardware.largest(_object(body, "settings"))),
        answered("POST", "/offers", lambda body: hardware.offers(_object(body, "settings"), _text(body, "model"))),
        answered("POST", "/measure", lambda _: hardware.measure().to_dict()),
        answered("POST", "/cancel", cancel),
    ]


# ------------------------------------------------------------------ what requests say


def _answering_errors(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            response = await route(request)
        except RamstreamError as error:
            status = 404 if request.method == "GET" else 409
            response = JSONResponse({"error": str(error)}, status)
        response.headers["cache-control"] = "no-store"
        return response

    return answer


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RunError("The request is not a JSON object.")
    return body


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise RunError(f"{name} is missing; it is a text.")
    return value


def _texts(body: dict[str, Any], name: str) -> list[str]:
    values = body.get(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RunError(f"{name} is missing; it is a list of texts.")
    return values


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise RunError(f"{name}: {value!r} is not an object of settings.")
    return value


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise RunError(f"{name}: {value!r} is not a number from {low:g} to {high:g}.")
    return float(value)
