"""The web server serves our own routes first, then Gradio's pages, all behind the guard.

Routes about runs, the form and the hardware answer 200 with JSON, or 4xx with `{"error":
sentence}`. Each module of routes lists its own.
"""

from __future__ import annotations

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
from starlette.routing import BaseRoute, Route

from app.login.login_form import login_routes
from app.pages.checker import Checker
from app.pages.hardware import Hardware
from app.pages.talk import Talk
from app.session.data_in import DataIn
from app.session.session import Session
from app.web.compare_routes import compare_routes
from app.web.draft_routes import draft_routes
from app.web.folder_routes import folder_routes
from app.web.form_routes import form_routes
from app.web.gradio_calls import CheckedCalls
from app.web.gradio_paths import OnlyNeeded
from app.web.gradio_streams import KnownStreams
from app.web.guard import Guard, GuardPolicy
from app.web.hardware_routes import hardware_routes
from app.web.job_routes import job_routes
from app.web.opening import Opening
from app.web.queue_routes import queue_routes
from app.web.run_routes import run_routes
from app.web.session_routes import session_routes
from app.web.talk_routes import talk_routes
from app.web.timeline_routes import timeline_routes
from app.web.upload_routes import upload_routes

BROWSER_FILES = Path(__file__).parent.parent / "browser"
FOREVER = "public, max-age=31536000, immutable"


def build_app(
    session: Session,
    checker: Checker,
    page: gr.Blocks,
    policy: GuardPolicy,
    data: DataIn | None = None,
    **mount: Any,
) -> FastAPI:
    """Returns the whole ASGI application. `mount` goes to Gradio: its theme and style sheet."""
    data = data or DataIn.of_runs(session.runs_dir)
    opening = Middleware(
        Opening,
        session=session,
        scripts=[plotly_address()],
        styles=_addresses(".css"),
        modules=_addresses(".js"),
    )
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=_routes(session, checker, policy, data),
        middleware=[
            Middleware(Guard, policy=policy),
            Middleware(OnlyNeeded),
            Middleware(CheckedCalls, page=page),
            Middleware(KnownStreams, page=page),
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
    # Gradio polls its queue a thousand times a second; twenty times is fast enough and leaves the
    # CPU to the run. Only this field of its queue can change that.
    page._queue.sleep_when_free = 0.05
    page._queue.progress_update_sleep_when_free = 0.1
    return app


def _routes(
    session: Session, checker: Checker, policy: GuardPolicy, data: DataIn
) -> list[BaseRoute]:
    """Returns our own routes. The first one that matches a request answers it."""
    routes: list[BaseRoute] = [
        *_file_routes(),
        *run_routes(session),
        *job_routes(session.jobs),
        *form_routes(checker),
        *hardware_routes(Hardware(session)),
        *talk_routes(Talk(session)),
        *draft_routes(session, checker),
        *compare_routes(session),
        *queue_routes(session),
        *timeline_routes(session),
        *upload_routes(session, data.uploads),
        *folder_routes(data.folders),
    ]
    if policy.login is not None:
        routes += [*login_routes(policy.login), *session_routes(policy.login)]
    return [*routes, *_nothing_routes()]


# ------------------------------------------------------------------ files of the page


_TYPES = {".css": "text/css", ".js": "text/javascript"}


@functools.cache
def page_files() -> dict[str, str]:
    """Returns the media type of each style sheet and script, by its path in `app/browser`."""
    files = sorted(path for path in BROWSER_FILES.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(BROWSER_FILES).as_posix(): _TYPES[path.suffix] for path in files}


def _addresses(ending: str) -> list[str]:
    """Returns the addresses of the page's files whose names end with `ending`."""
    return [f"/ramstream/{name}" for name in page_files() if name.endswith(ending)]


def _head() -> str:
    styles = [f'<link rel="stylesheet" href="{address}">' for address in _addresses(".css")]
    return (
        f'{"".join(styles)}<meta name="ramstream-plotly" content="{plotly_address()}">'
        '<script type="module" src="/ramstream/main.js"></script>'
    )


@functools.cache
def _plotly() -> tuple[bytes, str]:
    """Returns plotly.js of the installed package, compressed, and a name that identifies its
    version.

    The comment before it is Chromium's explicit compile hint. Nearly all functions of plotly.js are
    called as it loads, so the browser compiles them on another thread while the file arrives. The
    page is then blocked for only a seventh of the time.
    """
    text = b"//# allFunctionsCalledOnLoad\n" + get_plotlyjs().encode()
    return gzip.compress(text, 5), hashlib.sha256(text).hexdigest()[:12]


def plotly_address() -> str:
    """Returns the address of plotly.js, which is different for each version."""
    return f"/ramstream/plotly-{_plotly()[1]}.js"


def _file_routes() -> list[Route]:
    async def plotly(_: Request) -> Response:
        return Response(
            _plotly()[0],
            media_type="text/javascript",
            headers={"cache-control": FOREVER, "content-encoding": "gzip"},
        )

    async def page_file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in page_files():
            return JSONResponse({"error": "There is no such file."}, 404)
        # The browser checks at each load whether its copy is current: a new version of the program
        # must not run old scripts.
        return FileResponse(
            BROWSER_FILES / name,
            media_type=page_files()[name],
            headers={"cache-control": "no-cache"},
        )

    return [Route(plotly_address(), plotly), Route("/ramstream/{name:path}", page_file)]


def _nothing_routes() -> list[Route]:
    """Returns routes for unknown paths below our own, so that Gradio does not answer them."""

    async def nothing(_: Request) -> Response:
        return JSONResponse({"error": "There is no such page."}, 404)

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return [
        Route(f"/{folder}/{{rest:path}}", nothing, methods=methods)
        for folder in ("api", "ramstream")
    ]
