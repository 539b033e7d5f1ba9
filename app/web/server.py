"""The web server: our own routes, then Gradio's pages, all behind the guard.

Routes about runs, the form and the hardware answer 200 with JSON, or 4xx with `{"error":
sentence}`; each module of routes lists its own.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
import hashlib
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from plotly.offline import get_plotlyjs
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from app.form.settings_form import settings
from app.pages.checker import Checker
from app.pages.hardware import Hardware
from app.pages.talk import Talk
from app.session.session import Session
from app.web.compare_routes import compare_routes
from app.web.draft_routes import draft_routes
from app.web.gradio_calls import CheckedCalls
from app.web.gradio_paths import OnlyNeeded
from app.web.guard import Guard, GuardPolicy
from app.web.hardware_routes import hardware_routes
from app.web.job_routes import job_routes
from app.web.login import login_routes
from app.web.opening import Opening
from app.web.queue_routes import queue_routes
from app.web.requests import answering_errors, json_body, object_of, switch_of, text_of
from app.web.run_routes import run_routes
from app.web.talk_routes import talk_routes
from app.web.timeline_routes import timeline_routes
from engine.errors import RunError

BROWSER_FILES = Path(__file__).parent.parent / "browser"
FOREVER = "public, max-age=31536000, immutable"


def build_app(
    session: Session, checker: Checker, page: gr.Blocks, policy: GuardPolicy, **mount: Any
) -> FastAPI:
    """The whole ASGI application. `mount` is passed to Gradio (theme and css)."""
    routes = (
        _file_routes() + run_routes(session) + job_routes(session.jobs) + _check_routes(checker)
    )
    routes += hardware_routes(Hardware(session)) + talk_routes(Talk(session))
    routes += draft_routes(session, checker) + compare_routes(session) + queue_routes(session)
    routes += timeline_routes(session)
    if policy.login is not None:
        routes += login_routes(policy.login)
    routes += _nothing_routes()
    modules, styles = (
        [f"/ramstream/{name}" for name in page_files() if name.endswith(end)]
        for end in (".js", ".css")
    )
    opening = Middleware(
        Opening, session=session, scripts=[plotly_address()], styles=styles, modules=modules
    )
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=routes,
        middleware=[
            Middleware(Guard, policy=policy),
            Middleware(OnlyNeeded),
            Middleware(CheckedCalls, page=page),
            opening,
        ],
    )
    app = gr.mount_gradio_app(
        app,
        page,
        path="/",
        head=_head(),
        ssr_mode=False,
        run_history=False,
        show_error=False,
        enable_monitoring=False,
        footer_links=[],
        pwa=False,
        mcp_server=False,
        **mount,
    )
    # Gradio looks for work a thousand times a second; twenty times is quick enough and leaves the
    # CPU to the run. It offers no other way to say so than the fields of its queue.
    page._queue.sleep_when_free = 0.05
    page._queue.progress_update_sleep_when_free = 0.1
    return app


# ------------------------------------------------------------------ files of the page


@functools.cache
def page_files() -> dict[str, str]:
    """Style sheets and scripts of the page by their path in `app/browser`, each with its type."""
    return {
        path.relative_to(BROWSER_FILES).as_posix(): "text/css"
        if path.suffix == ".css"
        else "text/javascript"
        for path in sorted(BROWSER_FILES.rglob("*"))
        if path.suffix in (".css", ".js")
    }


def _head() -> str:
    styles = "".join(
        f'<link rel="stylesheet" href="/ramstream/{name}">'
        for name in page_files()
        if name.endswith(".css")
    )
    return (
        f'{styles}<meta name="ramstream-plotly" content="{plotly_address()}">'
        '<script type="module" src="/ramstream/main.js"></script>'
    )


@functools.cache
def _plotly() -> tuple[bytes, str]:
    """plotly.js of the installed package, and a name for this version of it.

    The comment before it is Chromium's explicit compile hint: nearly all of its functions are
    called as it loads, and so the browser compiles them on another thread while the file arrives.
    The page then stands still for a seventh of the time.
    """
    text = b"//# allFunctionsCalledOnLoad\n" + get_plotlyjs().encode()
    return gzip.compress(text, 5), hashlib.sha256(text).hexdigest()[:12]


def plotly_address() -> str:
    return f"/ramstream/plotly-{_plotly()[1]}.js"


def _file_routes() -> list[Route]:
    async def plotly(request: Request) -> Response:
        return Response(
            _plotly()[0],
            media_type="text/javascript",
            headers={"cache-control": FOREVER, "content-encoding": "gzip"},
        )

    async def page_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in page_files():
            return JSONResponse({"error": "There is no such file."}, 404)
        # Checked with the server at each load: a new version of the program must not meet old
        # scripts.
        return FileResponse(
            BROWSER_FILES / name,
            media_type=page_files()[name],
            headers={"cache-control": "no-cache"},
        )

    return [Route(plotly_address(), plotly), Route("/ramstream/{name:path}", page_file)]


def _nothing_routes() -> list[Route]:
    """What is not there under our own paths is answered by us, not by Gradio."""

    async def nothing(request: Request) -> Response:
        return JSONResponse({"error": "There is no such page."}, 404)

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return [
        Route(f"/{folder}/{{rest:path}}", nothing, methods=methods)
        for folder in ("api", "ramstream")
    ]


# ------------------------------------------------------------------ the form


def _check_routes(checker: Checker) -> list[Route]:
    """POST /api/check {preset, shown, keep}: the verdict of the form, which is kept as the draft
    unless `keep` is false.

    Beside Gradio's events: its queue, and the copies that its page makes of an answer, took longer
    than the estimate.
    """

    async def check(request: Request) -> Response:
        body = await json_body(request)
        preset = text_of(body, "preset") if body.get("preset") is not None else None
        keep = switch_of(body, "keep") if "keep" in body else True
        return JSONResponse(await asyncio.to_thread(checker.check, preset, _shown(body), keep))

    return [Route("/api/check", answering_errors(check), methods=["POST"])]


def _shown(body: dict[str, Any]) -> dict[str, Any]:
    """The value of every component of the form, by dotted name."""
    shown, known = object_of(body, "shown"), {setting.dotted: setting for setting in settings()}
    for name in [*known, *shown]:
        if name not in shown:
            raise RunError(f"shown: {name} is missing.")
        if name not in known:
            raise RunError(f"shown: {name!r} is not a setting.")
        if not known[name].holds(shown[name]):
            raise RunError(
                f"shown: {name} is not "
                f"{'true or false' if known[name].kind == 'switch' else 'a text'}."
            )
    return shown
