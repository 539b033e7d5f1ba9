"""These are the routes of the Hardware tab.

    GET  /api/hardware                      this machine
    GET  /api/hardware/choices              what the tab offers
    POST /api/hardware/column   {machine, timed, settings}     one machine of the table of models
    POST /api/hardware/csv      {machines, models, settings}   rows of that table as a file
    POST /api/hardware/largest  {settings}                     the largest model for a machine
    POST /api/hardware/offers   {model, settings}              the machines for a model
    POST /api/hardware/measure  {}                             starts a job
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.hardware import Hardware, choices
from app.web.requests import answering_errors, json_body, object_of, text_of, texts_of


def hardware_routes(hardware: Hardware) -> list[Route]:
    def answered(method: str, path: str, work: Callable[[dict[str, Any]], dict[str, Any]]) -> Route:
        """A route that computes in a thread: what it does takes up to seconds."""

        async def route(request: Request) -> Response:
            body = {} if method == "GET" else await json_body(request)
            return JSONResponse(await asyncio.to_thread(work, body))

        return Route(f"/api/hardware{path}", answering_errors(route), methods=[method])

    return [
        answered("GET", "", lambda _: hardware.about()),
        answered("GET", "/choices", lambda _: choices()),
        answered(
            "POST",
            "/column",
            lambda body: hardware.column(
                object_of(body, "settings"), text_of(body, "machine"), body.get("timed") is True
            ),
        ),
        answered(
            "POST",
            "/csv",
            lambda body: {
                "csv": hardware.csv(
                    object_of(body, "settings"),
                    texts_of(body, "machines"),
                    texts_of(body, "models"),
                )
            },
        ),
        answered("POST", "/largest", lambda body: hardware.largest(object_of(body, "settings"))),
        answered(
            "POST",
            "/offers",
            lambda body: hardware.offers(object_of(body, "settings"), text_of(body, "model")),
        ),
        answered("POST", "/measure", lambda _: hardware.measure().to_dict()),
    ]
