"""The web server serves our own routes first, then Gradio's pages, all behind the guard.

Routes about runs, the form and the hardware answer 200 with JSON, or 4xx with `{"error":
sentence}`. Each module of routes lists its own.
"""

from __future__ import annotations

from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from app.pages.chat.chat import Chat
from app.pages.chat.chat_routes import chat_routes
from app.pages.frame.job_routes import job_routes
from app.pages.frame.opening import Opening
from app.pages.hardware.hardware import Hardware
from app.pages.hardware.hardware_routes import hardware_routes
from app.pages.new.checker import Checker
from app.pages.new.draft_routes import draft_routes
from app.pages.new.folder_routes import folder_routes
from app.pages.new.form_routes import form_routes
from app.pages.new.upload_routes import upload_routes
from app.pages.run.run_routes import run_routes
from app.pages.run.timeline_routes import timeline_routes
from app.pages.runs.compare_routes import compare_routes
from app.pages.runs.list_routes import list_routes
from app.pages.runs.queue_routes import queue_routes
from app.pages.serve.openai_routes import openai_routes
from app.pages.serve.serve_routes import serve_routes
from app.server.compressed import Compressed
from app.server.first_script import FirstScript
from app.server.gradio_calls import CheckedCalls
from app.server.gradio_paths import OnlyNeeded
from app.server.gradio_streams import KnownStreams
from app.server.guard import Guard, GuardPolicy
from app.server.login import LOGIN_PATH
from app.server.login_form import login_routes
from app.server.page_files import (
    SCRIPT,
    STYLE,
    KeptFiles,
    file_routes,
    first_script,
    head,
    page_address,
)
from app.server.plotly_js import plotly_address
from app.server.quicker_gradio import quicker_routes
from app.server.session_routes import session_routes
from app.session.data_in import DataIn
from app.session.serving import Serving
from app.session.session import Session


def build_app(
    session: Session,
    checker: Checker,
    page: gr.Blocks,
    policy: GuardPolicy,
    data: DataIn | None = None,
    serving: Serving | None = None,
    **mount: Any,
) -> FastAPI:
    """Returns the whole ASGI application. `mount` goes to Gradio: its theme and style sheet."""
    data = data or DataIn.of_runs(session.runs_dir)
    serving = serving or Serving(session)
    opening = Middleware(
        Opening,
        session=session,
        plotly=plotly_address(),
        style=page_address(STYLE),
        script=page_address(SCRIPT),
    )
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        routes=_routes(session, checker, policy, data, serving),
        middleware=[
            Middleware(Guard, policy=policy),
            Middleware(OnlyNeeded),
            Middleware(Compressed),
            Middleware(KeptFiles),
            Middleware(CheckedCalls, page=page),
            Middleware(KnownStreams, page=page),
            opening,
            Middleware(FirstScript, script=first_script(), login=policy.login),
        ],
    )
    app = gr.mount_gradio_app(
        app,
        page,
        path="/",
        head=head(),
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
    session: Session, checker: Checker, policy: GuardPolicy, data: DataIn, serving: Serving
) -> list[BaseRoute]:
    """Returns our own routes. The first one that matches a request answers it."""
    routes: list[BaseRoute] = [
        *file_routes(),
        *quicker_routes(),
        *list_routes(session),
        *run_routes(session),
        *job_routes(session.jobs),
        *form_routes(checker),
        *hardware_routes(Hardware(session)),
        *chat_routes(Chat(session, serving=serving)),
        *serve_routes(serving, policy.api_key),
        *openai_routes(serving),
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


def _nothing_routes() -> list[Route]:
    """Returns routes for unknown paths below our own, so that Gradio does not answer them, nor what
    is sent to the login page: it has a login of its own there.
    """

    async def nothing(_: Request) -> Response:
        return JSONResponse({"error": "There is no such page."}, 404)

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return [
        *(
            Route(f"/{folder}/{{rest:path}}", nothing, methods=methods)
            for folder in ("api", "ramstream")
        ),
        Route(LOGIN_PATH, nothing, methods=methods),
    ]
